"""Peak memory of the head and the loss, beyond inputs, outputs and their gradients, as a share of the full logits.

    uv run python tools/bench/head_memory.py [--json]

Vocabulary 151,936, 8,192 tokens, hidden size 1,024, float32, forward and backward, on Linux. Each function is measured
in a process of its own, after a small warm-up that lets the libraries allocate what they keep.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

VOCABULARY, TOKENS, HIDDEN = 151_936, 8_192, 1_024
FULL_LOGITS = VOCABULARY * TOKENS * 4
FUNCTIONS = ("token_scores", "weighted_logp_sum")


def resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def step(function: str, tokens: int, vocabulary: int) -> tuple:
    """Inputs of one call, and the call with its backward; the call returns what it must keep alive."""
    import posttrain_losses
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN).requires_grad_()
    weight = (torch.randn(vocabulary, HIDDEN) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    weights = torch.full((tokens,), -1.0 / tokens)

    def call():
        if function == "token_scores":
            scores = posttrain_losses.token_scores(hidden, weight, targets)
            total = (scores.logps * weights).sum()
        else:
            total, scores = posttrain_losses.weighted_logp_sum(hidden, weight, targets, weights)
        total.backward()
        return scores

    return hidden, weight, call


def child(function: str) -> None:
    """Measure one function in this process; print its extra bytes."""
    step(function, 64, 4096)[2]()
    hidden, weight, call = step(function, TOKENS, VOCABULARY)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now
    before = resident("VmRSS")
    scores = call()
    kept = [hidden.grad, weight.grad, *(tensor for tensor in scores if tensor is not None)]
    print(resident("VmHWM") - before - sum(tensor.nbytes for tensor in kept))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("--bar", type=float, default=1 / 20, help="leave with an error above this share")
    parser.add_argument("--child", choices=FUNCTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)
    shares = {}
    for function in FUNCTIONS:
        command = [sys.executable, os.path.abspath(__file__), "--child", function]
        extra = int(subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout)
        shares[function] = extra / FULL_LOGITS
        print(f"{function:<20}{extra / 1e6:8.0f} MB extra, {shares[function]:.4f} of {FULL_LOGITS / 1e6:.0f} MB")
    if arguments.json:
        print(json.dumps({"head_memory_share": max(shares.values()), **shares}))
    if max(shares.values()) > arguments.bar:
        raise SystemExit(f"head_memory: above the bar of {arguments.bar}")


if __name__ == "__main__":
    main()

"""Train one workload with one library in this process and print what it cost: `python train.py SPEC`, SPEC in JSON.

The libraries share the names of their trainers and configs, so one file runs both: what differs is the import.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from workloads import WORKLOADS, read_rows  # noqa: E402

DISTRIBUTIONS = ("torch", "transformers", "accelerate", "datasets")


class StepEnds(TrainerCallback):
    """When each optimiser step ended: two neighbours enclose a whole step, its data and logging included."""

    def __init__(self, cuda: bool):
        self.cuda = cuda
        self.moments: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        """Note the time."""
        if self.cuda:
            torch.cuda.synchronize()
        self.moments.append(time.perf_counter())


def matmul_parameters(model: torch.nn.Module) -> int:
    """Weights that multiply a token's vector: every linear layer and the head, without the embedding table."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def step_tokens(history: list[dict], steps: int) -> list[int]:
    """Real tokens of each step, from the running total that both libraries log."""
    totals = [int(entry["num_tokens"]) for entry in history if "num_tokens" in entry and "loss" in entry]
    if len(totals) != steps:
        raise SystemExit(f"expected num_tokens of {steps} steps in the log, found {len(totals)}")
    return [b - a for a, b in zip([0, *totals], totals, strict=False)]


def versions(library: str) -> dict[str, str]:
    """Versions of what ran."""
    from importlib.metadata import version

    return {name: version(name) for name in (library, *DISTRIBUTIONS)}


def main() -> None:
    """Run, then print one line of JSON."""
    spec = json.loads(sys.argv[1])
    workload, cuda = WORKLOADS[spec["method"]], spec["device"] == "cuda"
    torch.set_num_threads(spec["threads"])
    library = importlib.import_module(spec["library"])

    def load_model() -> torch.nn.Module:
        options = {"attn_implementation": spec["attention"]} if spec["attention"] else {}
        return AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, **options)

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = StepEnds(cuda)
    with tempfile.TemporaryDirectory(prefix="bench-") as output:
        trainer = getattr(library, workload.trainer)(
            model=load_model(),
            args=getattr(library, workload.config)(output_dir=output, **spec["settings"]),
            train_dataset=Dataset.from_list(read_rows(spec["method"], spec["rows"])),
            processing_class=tokenizer,
            callbacks=[ends],
            **workload.arguments(spec["library"], load_model),
        )
        trainer.train()
    history = trainer.state.log_history
    print(
        json.dumps(
            {
                "seconds": [b - a for a, b in zip(ends.moments, ends.moments[1:], strict=False)],
                "tokens": step_tokens(history, len(ends.moments)),
                "losses": [entry["loss"] for entry in history if "loss" in entry],
                "peak_bytes": torch.cuda.max_memory_allocated() if cuda else peak_resident(),
                "matmul_parameters": matmul_parameters(trainer.model),
                "versions": versions(spec["library"]),
            }
        )
    )


def peak_resident() -> int:
    """The most memory this process ever held, in bytes (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()

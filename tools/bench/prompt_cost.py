"""Measure what a prompt twice as long costs where it is computed once, against where each completion repeats it.

    uv run --group bench python tools/bench/prompt_cost.py [--json] [--check]

For G completions of one prompt it times a forward and a backward of their log-probabilities, with a prompt of
`--prompt` tokens and with one of twice as many, in the `shared` and in the `padded` layout, in alternation. Memory that
a step frees is kept for the next one, as in training: new pages cost more than the difference looked for. Every
completion has the same length and there is one prompt, so that nothing is padded. What is compared is the time that
the longer prompt adds to the fastest step of each kind:

    share = (shared with 2T - shared with T) / (padded with 2T - padded with T)

Matrix products alone would give 1/G; attention, which is quadratic in the prompt, shares less of it than that for
the completions' own queries. `BENCH_MODEL` names a model folder to use instead of the default.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare import child, cores  # noqa: E402

BARS = {2: 0.6, 8: 0.2}
LAYOUTS = ("padded", "shared")


def seconds(work: Callable[[], None]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(model, completions: int, prompt: int, length: int, rounds: int) -> dict:
    """Seconds of the fastest step by layout and prompt length, and what the longer prompt adds."""
    import torch
    from posttrain_collators import CompletionBatch
    from posttrain_models import choose_layout, completion_logps
    from posttrain_trainer.memory import freed_memory_kept

    vocabulary = model.config.vocab_size
    draw = torch.Generator().manual_seed(0)

    def batch(width: int) -> CompletionBatch:
        prompts = torch.randint(vocabulary, (1, width), generator=draw)
        ends = torch.randint(vocabulary, (1, completions, length), generator=draw)
        return CompletionBatch(prompts, torch.ones_like(prompts).bool(), ends, torch.ones_like(ends).bool())

    batches = {width: batch(width) for width in (prompt, 2 * prompt)}
    found: dict[tuple[str, int], list[float]] = {(layout, width): [] for layout in LAYOUTS for width in batches}

    def step(width: int) -> None:
        model.zero_grad(set_to_none=True)
        completion_logps(model, batches[width]).sum().backward()

    with freed_memory_kept(torch.device("cpu")):
        for number in range(rounds + 1):
            for layout in LAYOUTS:
                choose_layout(model, layout)
                for width in batches:
                    took = seconds(lambda width=width: step(width))
                    if number:  # the first round warms up
                        found[layout, width].append(took)
    fastest = {key: min(values) for key, values in found.items()}  # what else runs on a machine only adds time
    added = {layout: fastest[layout, 2 * prompt] - fastest[layout, prompt] for layout in LAYOUTS}
    return {
        "completions": completions,
        "seconds": {layout: [fastest[layout, width] for width in batches] for layout in LAYOUTS},
        "added": added,
        "share": added["shared"] / added["padded"],
        "bar": BARS.get(completions),
    }


def table(results: list[dict], prompt: int) -> str:
    """The results for people."""
    lines = [
        f"{'':<12}{'layout':<10}{f'{prompt} tokens':>14}{f'{2 * prompt} tokens':>14}{'added':>10}{'share':>8}{'bar':>8}"
    ]
    for result in results:
        for layout in LAYOUTS:
            short, long = result["seconds"][layout]
            line = f"{'G=' + str(result['completions']):<12}{layout:<10}{short:>12.3f} s{long:>12.3f} s"
            line += f"{result['added'][layout]:>8.3f} s"
            if layout == "shared":
                bar = "" if result["bar"] is None else f"{result['bar']:.2f}"
                line += f"{result['share']:>8.2f}{bar:>8}"
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, nargs="+", default=list(BARS), help="completions of the prompt, G")
    parser.add_argument("--prompt", type=int, default=384, help="tokens of the shorter prompt, T")
    parser.add_argument("--length", type=int, default=96, help="tokens of every completion")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each kind, after an untimed one")
    parser.add_argument("--threads", type=int, default=cores(), help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    parser.add_argument("--check", action="store_true", help="leave with an error where a bar is missed")
    arguments = parser.parse_args()
    named = os.environ.get("BENCH_MODEL")
    folder = named or child("models.py", "smollm2-8-layers", threads=arguments.threads, show=False)

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    results = [
        measure(model, completions, arguments.prompt, arguments.length, arguments.rounds)
        for completions in arguments.completions
    ]
    print(table(results, arguments.prompt))
    print(
        f"\ncpu, float32, {arguments.threads} threads, completions of {arguments.length} tokens, forward and backward"
    )
    missed = [result for result in results if result["bar"] is not None and result["share"] > result["bar"]]
    for result in missed:
        print(f"missed: at G={result['completions']} the share is {result['share']:.2f}, the bar is {result['bar']}")
    if arguments.json:
        print(json.dumps(results))
    if missed and arguments.check:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Run posttrain and TRL on the same work and compare speed and peak memory.

    uv run --group bench python tools/bench/compare.py METHOD [--json] [--check]

Each run is a process of its own, in alternation (theirs, ours, theirs, ours), with the same rows in the same order,
the same model, threads and optimiser. Whole steps are timed, from the end of one to the end of the next, so the first
is never counted; between them the process measures the machine's matrix-multiply rate.

Both sides run in float32 without gradient checkpointing and with every other option at its default, except for what
the table names. `BENCH_MODEL` names a model folder and `BENCH_ROWS` a JSONL file to use instead of the defaults.

With `--json` the last line holds, among others:

    speed_ratio    tokens a second (pairs of completions for preference methods), ours over theirs
    memory_ratio   peak memory of the process (of the device on a GPU), ours over theirs
    peak_share     our model operations a second over the measured matrix-multiply rate in the same dtype.
                   Operations are those that the method needs, 6 x matmul parameters x real tokens and those of the
                   reference: a prompt counted once a step, the head for tokens that are scored alone.
                   Recomputation and attention are not counted.

Preference methods compute their reference within the timed steps, and both sides hold it. What prompts cost in each
layout is measured by tools/bench/prompt_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

from workloads import WORKLOADS, read_rows

HERE = Path(__file__).resolve().parent
OURS, THEIRS = "posttrain", "trl"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def child(script: str, *arguments: str, threads: int, show: bool) -> str:
    """Run a script of this folder; return its last line of output."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        env=environment,
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + (done.stderr or "")[-8000:])
        raise SystemExit(f"compare: {script} {' '.join(arguments)} failed ({done.returncode}), see above")
    return done.stdout.strip().splitlines()[-1]


def rival_attention() -> str | None:
    """The fastest attention that the rival can use on this machine's GPU."""
    if find_spec("flash_attn"):
        return "flash_attention_2"
    return "kernels-community/flash-attn2" if find_spec("kernels") else None


def specification(library: str, arguments: argparse.Namespace, model: str) -> dict:
    """What one child is told."""
    workload, cuda = WORKLOADS[arguments.method], arguments.device == "cuda"
    settings = {
        "per_device_train_batch_size": workload.batch,
        "max_steps": arguments.steps,
        "gradient_checkpointing": False,
        "bf16": cuda,
        "use_cpu": not cuda,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **workload.settings,
        **(workload.best if cuda else {}),
    }
    return {
        "method": arguments.method,
        "library": library,
        "model": model,
        "rows": os.environ.get("BENCH_ROWS"),
        "threads": arguments.threads,
        "device": arguments.device,
        "attention": rival_attention() if cuda and library == THEIRS else None,
        "settings": settings,
    }


def check_same_work(runs: dict[str, list[dict]], strict: bool) -> None:
    """Refuse to compare runs that did not see the same rows step by step, or whose first losses differ."""
    ours, theirs = runs[OURS][0], runs[THEIRS][0]
    if strict and any(run["sequences"] != theirs["sequences"] for side in runs.values() for run in side):
        raise SystemExit(f"compare: tokens a step differ: ours {ours['sequences']}, theirs {theirs['sequences']}")
    if strict and abs(ours["losses"][0] - theirs["losses"][0]) > 0.01 * abs(theirs["losses"][0]):
        raise SystemExit(f"compare: first losses differ: ours {ours['losses'][0]}, theirs {theirs['losses'][0]}")


def summary(runs: list[dict], operations: int) -> dict:
    """One side's runs in numbers: work a second over all timed steps, its share of the matmul peak, peak memory."""
    seconds = [s for run in runs for s in run["seconds"]]
    possible = sum(s * rate for run in runs for s, rate in zip(run["seconds"], run["rates"], strict=True))
    head = runs[0]["head_parameters"]
    body = runs[0]["matmul_parameters"] - head

    def timed(name: str) -> int:
        return sum(sum(run[name][1:]) for run in runs)

    return {
        "per_second": timed("work") / sum(seconds),
        "per_second_by_run": [sum(run["work"][1:]) / sum(run["seconds"]) for run in runs],
        "peak_share": operations * (body * timed("needed") + head * timed("scored")) / possible,
        "matmul_rates": [mean(run["rates"]) for run in runs],
        "steps_timed": len(seconds),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "first_loss": runs[0]["losses"][0],
        "last_loss": runs[0]["losses"][-1],
        "matmul_parameters": runs[0]["matmul_parameters"],
        "versions": runs[0]["versions"],
    }


def measure(arguments: argparse.Namespace, show: bool) -> tuple[dict, dict[str, dict]]:
    """Run both sides in alternation; return the result and the specification of each side."""
    named = os.environ.get("BENCH_MODEL")
    default = "qwen3-0.6b-shape" if arguments.device == "cuda" else "smollm2-8-layers"
    model = named or child("models.py", default, threads=arguments.threads, show=show)
    specs = {library: specification(library, arguments, model) for library in (THEIRS, OURS)}
    runs: dict[str, list[dict]] = {THEIRS: [], OURS: []}
    for number in range(arguments.rounds):
        for library, spec in specs.items():
            print(f"round {number + 1} of {arguments.rounds}: {library}", file=sys.stderr, flush=True)
            line = child("train.py", json.dumps(spec), threads=arguments.threads, show=show)
            runs[library].append(json.loads(line))
    # On a GPU each side packs in its own way, so steps hold different rows there.
    check_same_work(runs, strict=arguments.device == "cpu")
    workload = WORKLOADS[arguments.method]
    ours, theirs = (summary(runs[library], workload.operations) for library in (OURS, THEIRS))
    result = {
        "method": arguments.method,
        "device": arguments.device,
        "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
        "threads": arguments.threads,
        "model": named or default,
        "unit": workload.unit,
        "speed_ratio": ours["per_second"] / theirs["per_second"],
        "memory_ratio": ours["peak_bytes"] / theirs["peak_bytes"],
        "peak_share": ours["peak_share"],
        "their_peak_share": theirs["peak_share"],
        "tokens_per_step": runs[OURS][0]["sequences"],
        "ours": ours,
        "theirs": theirs,
    }
    return result, specs


def missed_bars(result: dict) -> list[str]:
    """The bars of the method that this result does not reach, one line each."""
    return [
        f"missed: {name} is {result[name]:.2f}, the bar is {bar}"
        for name, bar in WORKLOADS[result["method"]].bars.items()
        if (result[name] > bar if name == "memory_ratio" else result[name] < bar)
    ]


def table(result: dict, specs: dict[str, dict]) -> str:
    """The result for people."""
    ours, theirs = result["ours"], result["theirs"]
    digits = 3 if result["unit"] == "pairs" else 1

    def line(name: str, left: str, right: str, last: str = "") -> str:
        return f"{name:<24}{left:>20}{right:>20}{last:>8}"

    def differing(library: str) -> str:
        spec = specs[library]
        chosen = {**spec["settings"], **({"attn_implementation": spec["attention"]} if spec["attention"] else {})}
        return ", ".join(f"{key}={value}" for key, value in chosen.items())

    def rows(side: dict) -> str:
        return ", ".join(f"{rate:.{digits - 1}f}" for rate in side["per_second_by_run"])

    def rates(side: dict) -> str:
        return ", ".join(f"{rate / 1e9:.0f}" for rate in side["matmul_rates"])

    return "\n".join(
        [
            line(result["method"], f"posttrain {ours['versions'][OURS]}", f"trl {theirs['versions'][THEIRS]}", "ratio"),
            line(
                f"{result['unit']}/s",
                f"{ours['per_second']:.{digits}f}",
                f"{theirs['per_second']:.{digits}f}",
                f"{result['speed_ratio']:.2f}",
            ),
            line("  each run", rows(ours), rows(theirs)),
            line("matmul GFLOP/s between", rates(ours), rates(theirs)),
            line(
                "peak memory, GB",
                f"{ours['peak_bytes'] / 1e9:.2f}",
                f"{theirs['peak_bytes'] / 1e9:.2f}",
                f"{result['memory_ratio']:.2f}",
            ),
            line("share of matmul peak", f"{result['peak_share']:.0%}", f"{result['their_peak_share']:.0%}"),
            line("first loss", f"{ours['first_loss']:.4f}", f"{theirs['first_loss']:.4f}"),
            line("steps timed", str(ours["steps_timed"]), str(theirs["steps_timed"])),
            "",
            f"{result['device']}, {result['dtype']}, {result['threads']} threads, model {result['model']}",
            f"real tokens of each step: {', '.join(map(str, result['tokens_per_step']))}",
            f"posttrain set: {differing(OURS)}",
            f"trl set:       {differing(THEIRS)}",
            "everything else at its default on both sides; "
            + ", ".join(f"{name} {version}" for name, version in theirs["versions"].items() if name != THEIRS),
        ]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", choices=sorted(WORKLOADS), metavar="METHOD", help=", ".join(WORKLOADS))
    parser.add_argument("--list", action="store_true", help="print the methods and stop")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: bfloat16, TRL at its best")
    parser.add_argument("--steps", type=int, help="optimiser steps a run, the first untimed; by default the method's")
    parser.add_argument("--rounds", type=int, help="runs of each side; by default the method's")
    parser.add_argument("--threads", type=int, default=cores(), help="CPU threads of every process")
    parser.add_argument("--check", action="store_true", help="leave with an error where a bar is missed (CPU)")
    parser.add_argument("--verbose", action="store_true", help="show what the runs print")
    arguments = parser.parse_args()
    if arguments.list:
        return print(*WORKLOADS, sep="\n")
    if arguments.method is None:
        parser.error(f"name a METHOD: {', '.join(WORKLOADS)}")
    arguments.steps = arguments.steps or WORKLOADS[arguments.method].steps
    arguments.rounds = arguments.rounds or WORKLOADS[arguments.method].rounds
    if (arguments.steps - 1) * arguments.rounds < 10:
        print("compare: fewer than ten steps are timed, take the numbers as a hint", file=sys.stderr)
    if find_spec("trl") is None:
        raise SystemExit("compare: TRL is not installed; run: uv run --group bench python tools/bench/compare.py ...")
    read_rows(arguments.method, os.environ.get("BENCH_ROWS"))
    result, specs = measure(arguments, show=arguments.verbose)
    print(table(result, specs))
    missed = missed_bars(result) if arguments.device == "cpu" else []
    if missed:
        print("", *missed, sep="\n")
    if arguments.json:
        print(json.dumps(result))
    if missed and arguments.check:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

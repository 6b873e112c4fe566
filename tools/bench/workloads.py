"""What the side-by-side benchmarks train: one entry a method, the same rows and settings for both libraries.

Standard library only: the parent process that reads this must stay small, because a child's peak memory starts from it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WORDS = (
    "the a of to and in is that it was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out "
    "many then them these so some her would make like him into time has look two more write go see number no way "
    "could people my than first water been call who oil its now find long down day did get come made may part"
).split()


def lengths(count: int, median: int, sigma: float, high: int, seed: int = 0) -> list[int]:
    """Ragged, log-normal lengths in words, as real data has them."""
    draw = random.Random(seed)
    return [int(min(high, max(16, draw.lognormvariate(math.log(median), sigma)))) for _ in range(count)]


def text(words: int, seed: int) -> str:
    """That many common words; a word is about a token."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def sft_rows() -> list[dict]:
    """64 plain texts."""
    return [{"text": text(length, seed)} for seed, length in enumerate(lengths(64, 160, 0.8, 768))]


def preference_rows(count: int = 64) -> list[dict]:
    """Pairs of completions of one prompt: prompts of about 384 tokens, completions of about 96."""
    prompts = lengths(count, 384, 0.3, 640)
    chosen, rejected = (lengths(count, 96, 0.6, 256, seed) for seed in (1, 2))
    return [
        {
            "prompt": text(prompts[i], 3 * i),
            "chosen": " " + text(chosen[i], 3 * i + 1),
            "rejected": " " + text(rejected[i], 3 * i + 2),
        }
        for i in range(count)
    ]


def feedback_rows() -> list[dict]:
    """The same completions one by one: of each pair the chosen one, then the rejected one."""
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in preference_rows()
        for side in ("chosen", "rejected")
    ]


@dataclass(frozen=True)
class Workload:
    """One method's benchmark.

    Attributes:
        trainer: Name of the trainer in both libraries; its config is the same name with `Config`.
        rows: Makes the rows of the data set.
        batch: Rows an optimiser step.
        unit: What the speed counts a second: "tokens" (real ones), or "pairs" of completions.
        pairs: Pairs of completions an optimiser step, where they are counted.
        steps: Optimiser steps a run, the first of them untimed.
        rounds: Runs of each side, in alternation.
        settings: Config values that differ from the defaults, on both sides.
        model: The class of transformers that loads the model, and its further arguments.
        load: Arguments of loading it.
        own_padding: Padding needs a token of its own: transformers reads a reward before the first padding token, so
            that it would be read a token early where the end token pads.
        operations: Operations a matmul parameter and token that the method needs: 2 a forward, 4 a backward.
        arguments: Further trainer arguments, made in the child from `(library, load_model)`.
        best: What the rival sets beyond its defaults on a GPU, where it runs at its best.
        bars: Least `speed_ratio`, most `memory_ratio`, least `peak_share` on a CPU, for `--check`.
    """

    trainer: str
    rows: Callable[[], list[dict]]
    batch: int
    unit: str = "tokens"
    pairs: int = 0
    steps: int = 8
    rounds: int = 2
    settings: dict = field(default_factory=dict)
    model: str = "AutoModelForCausalLM"
    load: dict = field(default_factory=dict)
    own_padding: bool = False
    operations: int = 6
    arguments: Callable[[str, Callable], dict] = lambda library, load_model: {}
    best: dict = field(default_factory=dict)
    bars: dict = field(default_factory=dict)

    @property
    def config(self) -> str:
        """Name of the config class in both libraries."""
        return self.trainer.replace("Trainer", "Config")


# Preference methods compute their reference within the timed steps: nothing is precomputed on either side.
WORKLOADS = {
    "sft": Workload(
        "SFTTrainer",
        sft_rows,
        batch=8,
        # Its rows twice: the first time, a step that is longer than those before it pays for the memory that it adds.
        steps=16,
        settings={"max_length": 768},
        best={"packing": True},
        bars={"speed_ratio": 4.5, "memory_ratio": 0.38, "peak_share": 0.70},
    ),
    "dpo": Workload(
        "DPOTrainer",
        preference_rows,
        batch=4,
        unit="pairs",
        pairs=4,
        operations=6 + 2,  # the policy, and a forward of the reference
        bars={"speed_ratio": 3.5, "memory_ratio": 0.4},
    ),
    "kto": Workload(
        "KTOTrainer",
        feedback_rows,
        batch=8,
        unit="pairs",
        pairs=4,
        operations=6 + 2 + 4,  # and a forward of each on the mismatched completions
        bars={"speed_ratio": 2.5, "memory_ratio": 0.4},
    ),
    "reward": Workload(
        "RewardTrainer",
        preference_rows,
        batch=4,
        unit="pairs",
        pairs=4,
        model="AutoModelForSequenceClassification",
        load={"num_labels": 1},
        own_padding=True,
        # Its runs last less than a minute, in which the speed of a shared machine can change by a third.
        rounds=4,
        # No bar on memory: neither side has logits, and what both must hold, an idle process with the weights and
        # Adam's state, is 1.3 of the 2.1 GB that 0.4 would be, before any gradient or activation.
        bars={"speed_ratio": 2.2},
    ),
}


def read_rows(method: str, path: str | None) -> list[dict]:
    """The rows of the JSONL file `path`, or the method's own."""
    if path is None:
        return WORKLOADS[method].rows()
    with Path(path).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise SystemExit(f"BENCH_ROWS={path} holds no rows")
    return rows

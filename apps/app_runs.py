"""What the tests of the apps share: short runs on tiny models, commands, and what is read of them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from posttrain_cli import Command, make_table
from posttrain_models import tiny_model, unwrap

WORDS = "river mountain house garden music paper winter summer yellow stone bridge window".split()
QUIET = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "--max_length", "64", "--logging_steps", "1"]
# Plain gradient descent at a visible rate, every step logged, nothing saved.
SETTINGS: dict[str, Any] = {
    "output_dir": "out",
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 1,
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0,
    "gradient_checkpointing": False,
    "train_sampling_strategy": "sequential",
    "per_device_train_batch_size": 4,
    "max_length": 64,
    "log_level": "error",
}


def saved(folder: Path, architecture: str, tokenizer: Any) -> Path:
    """A folder with a tiny language model of an architecture and its tokenizer."""
    tiny_model(architecture, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logged(made: Any, name: str) -> list[float]:
    """The values of a metric in a trainer's log."""
    return [entry[name] for entry in made.state.log_history if name in entry]


def losses(made: Any) -> list[float]:
    """The losses in a trainer's log."""
    return logged(made, "loss")


def parameters(made: Any) -> dict[str, torch.Tensor]:
    """A copy of every parameter, of a trainer's model or of a model."""
    model = unwrap(getattr(made, "model", made))
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(one: dict, other: dict, tolerance: float = 2e-6) -> None:
    """Equal names and, to the tolerance (absolute), equal values; 0 means bit for bit."""
    assert one.keys() == other.keys()
    gaps = {name: float((one[name] - other[name]).abs().max()) for name in one}
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= tolerance, f"{worst} differs by {gaps[worst]}"


def step_gradient(before: dict, after: dict, rate: float = SETTINGS["learning_rate"]) -> dict[str, torch.Tensor]:
    """The gradient that a step of plain gradient descent took."""
    return {name: (before[name].double() - after[name].double()) / rate for name in before}


def process(*words: Any, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """This Python with arguments, in a process of its own."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300
    )


def write(name: str | Path, rows: list[dict]) -> str | Path:
    """A JSONL file of rows; returns its name."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def history(folder: str | Path = "out") -> list[dict]:
    """The log of the last checkpoint."""
    last = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def values(name: str, folder: str | Path = "out") -> list[float]:
    """The values of a metric in the log of the last checkpoint."""
    return [entry[name] for entry in history(folder) if name in entry]


def check_option_table(command: Command, where: str) -> None:
    """The shipped options are those of the configs, and each has a help text."""
    shipped, live = json.loads(command.table.read_text()), make_table(command.groups)
    assert [option["name"] for option in shipped["options"] if not option["help"]] == []
    if shipped["versions"] != live["versions"]:
        pytest.skip("the table is shipped for other versions, and is rebuilt here")
    wrong = f"run `python -m posttrain_cli {where}` to write the table anew"
    assert shipped["configs"] == live["configs"], wrong
    mine, theirs = ({option["name"]: option for option in table["options"]} for table in (shipped, live))
    assert mine == theirs, wrong


def check_refused(make: Callable[[], Any], *wanted: str) -> None:
    """A constructor refuses, naming all of `wanted`, before it reaches the weights that are not there."""
    with pytest.raises(ValueError) as caught:
        make()
    message = str(caught.value)
    assert "cannot be loaded" not in message
    for words in wanted:
        assert words in message, message

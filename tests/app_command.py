"""Runs of an app's command, such as `python -m posttrain_sft`, on a tiny model, and their results."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from posttrain_data import tiny_tokenizer
from posttrain_models import tiny_model
from safetensors.torch import load_file

WORDS = "river mountain house garden music paper winter summer yellow stone bridge window".split()
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")


def start(folder: Path, *, app: str = "sft", cpu: bool = True, **options: object) -> subprocess.Popen:
    """The command, in a process group of its own, with its results in `folder` and what it says beside it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder.parent / "cache")}
    if cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"posttrain_{app}", *flags(folder, {"use_cpu": cpu, **options})],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def flags(folder: Path, options: dict) -> list[str]:
    settings = {"report_to": "none", "disable_tqdm": True, "output_dir": folder, **options}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def run_here(folder: Path, *, app: str = "sft", **options: object) -> None:
    """The same in this process, which saves the seconds that imports take."""
    command = importlib.import_module(f"posttrain_{app}.command")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder.parent / "cache")
        assert command.main(flags(folder, {"use_cpu": True, **options})) == 0


def assert_resumes(folder: Path, options: dict, *, killed: int, app: str = "sft") -> None:
    """A run that is killed after its checkpoint at step `killed` and resumed is the run that was not, bit for bit."""
    steps = options["max_steps"]
    whole, cut = folder / "whole", folder / "cut"
    undisturbed = start(whole, app=app, **options)
    kill_after(start(cut, app=app, **options), cut / f"checkpoint-{killed}")
    assert not (cut / f"checkpoint-{steps}").exists()
    finish(start(cut, app=app, **options, resume_from_checkpoint=True), cut)
    finish(undisturbed, whole)

    one, other = weights(whole), weights(cut)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    pairs = list(zip(*(optimizer(run / f"checkpoint-{steps}") for run in (whole, cut)), strict=True))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)
    assert log(whole, steps) == log(cut, steps)
    assert len({entry["loss"] for entry in log(whole, steps)}) == len(log(whole, steps)) >= 4


def finish(process: subprocess.Popen, folder: Path) -> None:
    code = process.wait(timeout=400)
    assert code == 0, (folder.parent / f"{folder.name}.log").read_text()[-4000:]


def kill_after(process: subprocess.Popen, checkpoint: Path) -> None:
    """Kill the run and everything it started (SIGKILL) as soon as a checkpoint is there."""
    until = time.monotonic() + 300
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < until, "the run ended before its checkpoint"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first * 5 + n) % len(WORDS)] for n in range(count))


def rows(file: Path, count: int) -> Path:
    """Conversations of many lengths."""
    return save_rows(
        file,
        [
            {"messages": [{"role": "user", "content": WORDS[row % 12]},
                          {"role": "assistant", "content": words(row, 1 + row % 7)}]}
            for row in range(count)
        ],
    )  # fmt: skip


def save_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def save_model(folder: Path, architecture: str, **overrides: object) -> Path:
    """A tiny model and its tokenizer."""
    tokenizer = tiny_tokenizer()
    tiny_model(architecture, vocab_size=len(tokenizer), **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Large enough that a step outlasts the time in which the kill follows the checkpoint.
SLOW_MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}


def log(folder: Path, step: int) -> list[dict]:
    """What a run logged until a checkpoint, without how long it took."""
    history = json.loads((folder / f"checkpoint-{step}/trainer_state.json").read_text())["log_history"]
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in history]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def optimizer(folder: Path) -> list[torch.Tensor]:
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return [value for one in state.values() for value in one.values() if isinstance(value, torch.Tensor)]

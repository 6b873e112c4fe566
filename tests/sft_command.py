"""Runs of `python -m posttrain_sft` on a tiny model, and their results."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

WORDS = "river mountain house garden music paper winter summer yellow stone bridge window".split()
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")


def start(folder: Path, **options: object) -> subprocess.Popen:
    """The command, in a process group of its own, with its results in `folder` and what it says beside it."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "HF_HOME": str(folder.parent / "cache"),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "posttrain_sft", *flags(folder, options)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def flags(folder: Path, options: dict) -> list[str]:
    settings = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "output_dir": folder, **options}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def run_here(folder: Path, **options: object) -> None:
    """The same in this process, which saves the seconds that imports take."""
    from posttrain_sft.command import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder.parent / "cache")
        assert main(flags(folder, options)) == 0


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


def rows(file: Path, count: int) -> Path:
    """Conversations of many lengths."""
    lines = []
    for row in range(count):
        answer = " ".join(WORDS[(row * 5 + n) % 12] for n in range(1 + row % 7))
        messages = [{"role": "user", "content": WORDS[row % 12]}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))
    return file


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

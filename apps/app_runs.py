"""What the tests of the apps share: short runs on tiny models, commands, and what is read of them."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from posttrain_cli import Command, load, make_table
from posttrain_devices import device_spec
from posttrain_launchers import launch_options, world_size
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


def words(start: int, count: int) -> str:
    """`count` words, others for another start."""
    return " ".join(WORDS[(start * 5 + n) % len(WORDS)] for n in range(count))


def double(model: Any) -> Any:
    """A float64 copy with transformers' plain attention."""
    model = copy.deepcopy(unwrap(model)).double().eval()
    model.set_attn_implementation("eager")
    return model


def plain_logps(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probabilities of the completion's tokens from full logits, one sequence at a time."""
    ids = torch.tensor([[*prompt, *completion]])
    logps = model(ids).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, ids[0, 1:, None])[-len(completion) :, 0]


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


def check_light_start(module: str, *flags: str) -> None:
    """Help, which names the flags, and a mistyped flag import nothing heavy."""
    code = f"""
import sys
from {module}.command import main
for words in (["--max_lenght", "5"], ["--help"]):
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    print(code, sorted({{"torch", "transformers", "datasets", "peft", "numpy"}} & sys.modules.keys()))
"""
    done = process("-c", code)
    assert done.returncode == 0, done.stderr
    assert "did you mean --max_length" in done.stderr
    printed = done.stdout.splitlines()
    assert printed[0] == "2 []" and printed[-1] == "0 []"
    assert all(flag in done.stdout for flag in (*flags, "--lora_r", "--dataset_name", "--nproc_per_node"))


def check_static_shapes(make: Callable[..., Any], rows: list[dict], tokenizer: Any, monkeypatch: Any) -> None:
    """On a device with static shapes every forward has a planned shape, and training is the same."""
    spec = replace(device_spec("cpu"), static_shapes=True, max_shapes=2)
    options = {"extras": {"ref_model": tiny_model("llama", vocab_size=len(tokenizer), seed=1)}}
    free = make(rows, tokenizer, per_device_train_batch_size=8, **options)
    free.train()
    monkeypatch.setattr("posttrain_app.shapes.device_spec", lambda *_: spec)
    made = make(rows, tokenizer, gradient_accumulation_steps=2, **options)
    made.train()
    probe = 2  # rows of the batch with which the head is tried once
    assert made.shape_plan.static and {shape for shape in made.shape_watch.unplanned if shape[0] != probe} == set()
    assert set(made.shape_watch.seen) & made.shape_plan.shapes
    assert_same(parameters(free), parameters(made), 5e-6)


def check_adapter_run(main: Callable, model_folder: Path, rows: list[dict], *options: str) -> dict:
    """A command trains an adapter and saves it; returns its configuration."""
    pytest.importorskip("peft")
    write("rows.jsonl", rows)
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "rows.jsonl", "--output_dir", "out", *QUIET]
    assert main([*argv, "--use_peft", "--lora_r", "4", "--max_steps", "1", *options]) == 0
    saved = json.loads(Path("out/adapter_config.json").read_text())
    assert saved["r"] == 4
    return saved


def planned(command: Command, *words: str) -> None:
    """Prints the plan of a run on two devices."""
    parsed = command.parse([*words, *QUIET, "--nproc_per_node", "2"])
    assert load(command.plan)(*parsed.build(), world_size=world_size(launch_options(parsed))) == 0


def check_demonstration(module: str, folder: Path) -> None:
    """Without arguments a command learns to tell pairs apart, and leaves nothing behind."""
    done = process("-m", module, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(text) for text in re.findall(r"^loss +(.*)$", done.stdout, re.MULTILINE)[0].split(" -> ")]
    before, after = re.search(r"^accuracy +(\S+) -> (\S+)", done.stdout, re.MULTILINE).groups()
    assert losses[-1] < losses[0] and float(before) < float(after)
    assert list(folder.iterdir()) == []


def check_two_processes(module: str, model_folder: Path, rows: list[dict], folder: Path) -> None:
    """A run on two processes logs what one logs, evaluations with a ragged last batch among it."""
    write(folder / "rows.jsonl", rows)
    found = []
    for processes, accumulation in ((1, 2), (2, 1)):
        out = folder / f"out{processes}"
        argv = ["--model_name_or_path", model_folder, "--dataset_name", "rows.jsonl", "--output_dir", out, *QUIET]
        split = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", accumulation]
        evaluation = ["--test_split_size", "5", "--eval_strategy", "epoch", "--per_device_eval_batch_size", "2"]
        command = [*argv, *split, *evaluation, "--nproc_per_node", processes, "--num_train_epochs", "2"]
        done = process("-m", module, *command, "--learning_rate", "0.02", cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(history(out))
    for one, two in zip(*found, strict=True):
        for name in one:
            if not name.endswith(("runtime", "per_second")):
                assert two[name] == pytest.approx(one[name], rel=2e-4, abs=2e-5), name


def check_refused(make: Callable[[], Any], *wanted: str) -> None:
    """A constructor refuses, naming all of `wanted`, before it reaches the weights that are not there."""
    with pytest.raises(ValueError) as caught:
        make()
    message = str(caught.value)
    assert "cannot be loaded" not in message
    for words in wanted:
        assert words in message, message

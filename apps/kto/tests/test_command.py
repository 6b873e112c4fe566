"""The command: `python -m posttrain_kto`, and in this process where no process of its own is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kto_runs import feedback
from posttrain_cli import make_table
from posttrain_kto.command import COMMAND, main

QUIET = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "--max_length", "64", "--logging_steps", "1"]


def process(*words, cwd=None):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300
    )


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(name)


def test_the_shipped_options_are_those_of_the_configs():
    shipped, live = json.loads(COMMAND.table.read_text()), make_table(COMMAND.groups)
    if shipped["versions"] != live["versions"]:
        pytest.skip("the table is shipped for other versions, and is rebuilt here")
    wrong = "run `python -m posttrain_cli posttrain_kto.command:COMMAND` to write the table anew"
    assert shipped["configs"] == live["configs"], wrong
    mine, theirs = ({option["name"]: option for option in table["options"]} for table in (shipped, live))
    assert mine == theirs, wrong


def test_every_option_has_a_help_text():
    options = json.loads(COMMAND.table.read_text())["options"]
    assert [option["name"] for option in options if not option["help"]] == []


def test_a_run_from_a_file(model_folder, capsys):
    write("rows.jsonl", feedback(12))
    Path("run.yaml").write_text(f"""\
model_name_or_path: {model_folder}
dataset_name: rows.jsonl
test_split_size: 4
eval_strategy: epoch
desirable_weight: 1.2
num_train_epochs: 1
output_dir: out
""")
    assert main(["--config", "run.yaml", *QUIET, "--beta", "0.2"]) == 0
    output = capsys.readouterr().out
    assert "eval_rewards/accuracies" in output and "saved to" in output
    assert Path("out/model.safetensors").exists() and Path("out/README.md").exists()
    assert main(["--config", "run.yaml", *QUIET, "--beta", "0.2", "--resume_from_checkpoint", "true"]) == 0


def test_an_adapter_from_the_command_line(model_folder):
    pytest.importorskip("peft")
    write("rows.jsonl", feedback(8))
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "rows.jsonl", "--output_dir", "out", *QUIET]
    assert main([*argv, "--use_peft", "--lora_r", "4", "--max_steps", "1", "--loss_type", "apo_zero_unpaired"]) == 0
    assert json.loads(Path("out/adapter_config.json").read_text())["r"] == 4


def test_the_plan(no_weights, capsys):
    from posttrain_cli import load
    from posttrain_launchers import launch_options, world_size

    write("rows.jsonl", feedback(8))
    for words in ([], ["--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl"]):
        parsed = COMMAND.parse([*words, *QUIET, "--nproc_per_node", "2"])
        assert load(COMMAND.plan)(*parsed.build(), world_size=world_size(launch_options(parsed))) == 0
        output = capsys.readouterr().out
        assert "shared layout" in output and "x 2 devices" in output
        assert "reference: a second copy" in output and output.count("\ncompletion,") == 3


def test_the_demonstration(tmp_path):
    done = process("-m", "posttrain_kto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(text) for text in re.findall(r"^loss +(.*)$", done.stdout, re.MULTILINE)[0].split(" -> ")]
    before, after = re.search(r"^accuracy +(\S+) -> (\S+)", done.stdout, re.MULTILINE).groups()
    assert losses[-1] < losses[0] and float(before) < float(after)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_are_one(model_folder, tmp_path):
    """Evaluation with a ragged last batch, too."""
    write(tmp_path / "rows.jsonl", feedback(20))
    found = []
    for processes, accumulation in ((1, 2), (2, 1)):
        out = tmp_path / f"out{processes}"
        argv = ["--model_name_or_path", model_folder, "--dataset_name", "rows.jsonl", "--output_dir", out, *QUIET]
        split = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", accumulation]
        evaluation = ["--test_split_size", "5", "--eval_strategy", "epoch", "--per_device_eval_batch_size", "2"]
        command = [*argv, *split, *evaluation, "--nproc_per_node", processes, "--num_train_epochs", "2"]
        done = process("-m", "posttrain_kto", *command, "--learning_rate", "0.02", cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        found.append(json.loads((last / "trainer_state.json").read_text())["log_history"])
    for one, two in zip(*found, strict=True):
        for name in one:
            if not name.endswith(("runtime", "per_second")):
                assert two[name] == pytest.approx(one[name], rel=2e-4, abs=2e-5), name

"""The command: `python -m posttrain_dpo`, and in this process where no process of its own is needed."""

import json
import re
from pathlib import Path

import pytest
from app_runs import QUIET, check_option_table, process, write
from dpo_runs import pairs
from posttrain_dpo.command import COMMAND, main


def test_the_shipped_options_are_those_of_the_configs():
    check_option_table(COMMAND, "posttrain_dpo.command:COMMAND")


def test_a_run_from_a_file(model_folder, capsys):
    write("rows.jsonl", pairs(12))
    Path("run.yaml").write_text(f"""\
model_name_or_path: {model_folder}
dataset_name: rows.jsonl
test_split_size: 4
eval_strategy: epoch
loss_type: [sigmoid, sft]
loss_weights: [1.0, 0.1]
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
    write("rows.jsonl", pairs(8))
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "rows.jsonl", "--output_dir", "out", *QUIET]
    assert main([*argv, "--use_peft", "--lora_r", "4", "--max_steps", "1", "--loss_type", "sigmoid", "ipo"]) == 0
    assert json.loads(Path("out/adapter_config.json").read_text())["r"] == 4


def test_the_plan(no_weights, capsys):
    from posttrain_cli import load
    from posttrain_launchers import launch_options, world_size

    write("rows.jsonl", pairs(8))
    for words in ([], ["--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl"]):
        parsed = COMMAND.parse([*words, *QUIET, "--nproc_per_node", "2"])
        assert load(COMMAND.plan)(*parsed.build(), world_size=world_size(launch_options(parsed))) == 0
        output = capsys.readouterr().out
        assert "shared layout" in output and "x 2 devices" in output
        assert "reference: a second copy" in output and output.count("\nrejected,") == 3


def test_the_demonstration(tmp_path):
    done = process("-m", "posttrain_dpo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(text) for text in re.findall(r"^loss +(.*)$", done.stdout, re.MULTILINE)[0].split(" -> ")]
    before, after = re.search(r"^accuracy +(\S+) -> (\S+)", done.stdout, re.MULTILINE).groups()
    assert losses[-1] < losses[0] and float(before) < float(after)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_are_one(model_folder, tmp_path):
    """Evaluation with a ragged last batch, too."""
    write(tmp_path / "rows.jsonl", pairs(20))
    found = []
    for processes, accumulation in ((1, 2), (2, 1)):
        out = tmp_path / f"out{processes}"
        argv = ["--model_name_or_path", model_folder, "--dataset_name", "rows.jsonl", "--output_dir", out, *QUIET]
        split = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", accumulation]
        evaluation = ["--test_split_size", "5", "--eval_strategy", "epoch", "--per_device_eval_batch_size", "2"]
        command = [*argv, *split, *evaluation, "--nproc_per_node", processes, "--num_train_epochs", "2"]
        done = process("-m", "posttrain_dpo", *command, "--learning_rate", "0.02", cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        found.append(json.loads((last / "trainer_state.json").read_text())["log_history"])
    for one, two in zip(*found, strict=True):
        for name in one:
            if not name.endswith(("runtime", "per_second")):
                assert two[name] == pytest.approx(one[name], rel=2e-4, abs=2e-5), name

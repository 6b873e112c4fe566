"""The command: `python -m posttrain_kto`, and in this process where no process of its own is needed."""

from pathlib import Path

import pytest
from app_runs import (
    QUIET,
    check_adapter_run,
    check_demonstration,
    check_light_start,
    check_option_table,
    check_two_processes,
    planned,
    write,
)
from kto_runs import feedback
from posttrain_kto.command import COMMAND, main


def test_the_shipped_options_are_those_of_the_configs():
    check_option_table(COMMAND, "posttrain_kto.command:COMMAND")


def test_help_and_a_mistyped_flag_import_no_torch():
    check_light_start("posttrain_kto", "--desirable_weight")


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
    check_adapter_run(main, model_folder, feedback(8), "--loss_type", "apo_zero_unpaired")


def test_the_plan(no_weights, capsys):
    write("rows.jsonl", feedback(8))
    for words in ([], ["--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl"]):
        planned(COMMAND, *words)
        output = capsys.readouterr().out
        assert "shared layout" in output and "x 2 devices" in output
        assert "reference: a second copy" in output and output.count("\ncompletion,") == 3


def test_the_demonstration(tmp_path):
    check_demonstration("posttrain_kto", tmp_path)


@pytest.mark.slow
def test_two_processes_are_one(model_folder, tmp_path):
    check_two_processes("posttrain_kto", model_folder, feedback(20), tmp_path)

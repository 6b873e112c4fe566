"""The command: `python -m posttrain_dpo`, and in this process where no process of its own is needed."""

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
from dpo_runs import pairs
from posttrain_dpo.command import COMMAND, main


def test_the_shipped_options_are_those_of_the_configs():
    check_option_table(COMMAND, "posttrain_dpo.command:COMMAND")


def test_help_and_a_mistyped_flag_import_no_torch():
    check_light_start("posttrain_dpo", "--beta")


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
    check_adapter_run(main, model_folder, pairs(8), "--loss_type", "sigmoid", "ipo")


def test_the_plan(no_weights, capsys):
    write("rows.jsonl", pairs(8))
    for words in ([], ["--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl"]):
        planned(COMMAND, *words)
        output = capsys.readouterr().out
        assert "shared layout" in output and "x 2 devices" in output
        assert "reference: a second copy" in output and output.count("\nrejected,") == 3


def test_the_plan_of_a_saved_adapter(model_folder, capsys):
    check_adapter_run(main, model_folder, pairs(8))
    capsys.readouterr()
    new = ["--model_name_or_path", str(model_folder), "--use_peft", "--lora_r", "4"]
    memory = []
    for words in (["--model_name_or_path", "out"], new):
        planned(COMMAND, *words, "--dataset_name", "rows.jsonl")
        output = capsys.readouterr().out
        assert "reference: a second copy" not in output
        memory += [line for line in output.splitlines() if line.startswith("memory:")]
    assert len(memory) == 2 and memory[0] == memory[1]


def test_the_demonstration(tmp_path):
    check_demonstration("posttrain_dpo", tmp_path)


@pytest.mark.slow
def test_two_processes_are_one(model_folder, tmp_path):
    check_two_processes("posttrain_dpo", model_folder, pairs(20), tmp_path)

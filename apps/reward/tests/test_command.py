"""The command: `python -m posttrain_reward`, and in this process where no process of its own is needed."""

import re
from pathlib import Path

import pytest
from app_runs import QUIET, check_adapter_run, check_light_start, check_option_table, process, values, write
from posttrain_reward.command import COMMAND, main
from reward_runs import chats, texts
from transformers import AutoModelForSequenceClassification


def test_the_shipped_options_are_those_of_the_configs():
    check_option_table(COMMAND, "posttrain_reward.command:COMMAND")


def test_help_and_a_mistyped_flag_import_no_torch():
    check_light_start("posttrain_reward", "--center_rewards_coefficient")


def test_a_file_trains_and_a_share_is_held_out(model_folder, capsys):
    write("pairs.jsonl", texts(20))
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "pairs.jsonl", "--output_dir", "out", *QUIET]
    options = ["--test_split_size", "0.2", "--eval_strategy", "epoch", "--num_train_epochs", "1"]
    assert main([*argv, *options]) == 0
    assert len(values("loss")) == 2
    said = capsys.readouterr().out
    assert said.count("'eval_accuracy'") == 1 and "saved to" in said
    assert AutoModelForSequenceClassification.from_pretrained("out").config.num_labels == 1


def test_an_adapter_from_the_command_line(model_folder):
    saved = check_adapter_run(main, model_folder, chats(8))
    assert saved["task_type"] == "SEQ_CLS" and "score" in saved["modules_to_save"]


def test_the_plan(no_weights, capsys):
    posttrain = pytest.importorskip("posttrain.command")
    write("pairs.jsonl", chats(20))
    argv = ["--dataset_name", "pairs.jsonl", "--use_cpu", "--per_device_train_batch_size", "2"]
    more = ["--gradient_accumulation_steps", "3", "--num_train_epochs", "2"]
    assert posttrain.main(["plan", "reward", "--model_name_or_path", str(no_weights), *argv, *more]) == 0
    said = capsys.readouterr().out
    assert "2 rows a device x 3 accumulated x 1 devices = 6 rows a step; 20 rows, 4 steps an epoch, 8 steps" in said
    assert "GiB of weights" in said and "shapes on cpu" in said
    assert said.count("\npair ") == 3 and "«mountain<|im_end|>»" in said
    assert not Path("trainer_output").exists() and not list(Path().glob("*Reward*"))
    assert posttrain.main(["plan", "reward", "--use_cpu"]) == 0
    assert "16 rows" in capsys.readouterr().out


def test_without_arguments_a_tiny_model_learns(tmp_path):
    done = process("-m", "posttrain_reward", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.search(r"^loss +(.+)$", done.stdout, re.MULTILINE)[1].split(" -> ")]
    assert losses[-1] < 0.1 < 0.4 < losses[0] and losses == sorted(losses, reverse=True)
    before, after = map(float, re.search(r"^accuracy +(\S+) -> (\S+) ", done.stdout, re.MULTILINE).groups())
    assert after == 1.0 > before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_evaluate_as_one(model_folder, tmp_path):
    """A ragged last batch, and a rank without rows in it, change nothing."""
    write(tmp_path / "pairs.jsonl", texts(23))
    argv = ["--model_name_or_path", model_folder, "--dataset_name", "pairs.jsonl", "--test_split_size", "7"]
    options = ["--eval_strategy", "steps", "--eval_steps", "1", "--max_steps", "2", "--per_device_eval_batch_size", "3"]
    for processes in (1, 2):
        size = ["--per_device_train_batch_size", 8 // processes, "--nproc_per_node", processes]
        words = [*argv, *QUIET, *options, *size, "--output_dir", f"out{processes}"]
        done = process("-m", "posttrain_reward", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    for name in ("loss", "eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward", "eval_max_reward"):
        one, two = values(name, tmp_path / "out1"), values(name, tmp_path / "out2")
        assert len(one) == 2 and two == pytest.approx(one, abs=2e-6), name

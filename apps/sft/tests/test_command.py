"""The command: `python -m posttrain_sft`, and in this process where no process of its own is needed."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from app_runs import QUIET, check_light_start, check_option_table, process, values, write
from datasets import Dataset
from posttrain_sft.command import COMMAND, main
from sft_runs import chats, pairs, texts
from transformers import AutoModelForCausalLM


def test_the_shipped_options_are_those_of_the_configs():
    check_option_table(COMMAND, "posttrain_sft.command:COMMAND")


# ---- The option table ----


def test_help_and_a_mistyped_flag_import_no_torch():
    check_light_start("posttrain_sft", "--packing")


# ---- Data and YAML ----


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "folder"])
def test_local_files_of_every_kind(kind, model_folder):
    rows, name = texts(8), f"rows.{kind}"
    if kind == "json":
        Path(name).write_text(json.dumps(rows))
    elif kind == "jsonl":
        write(name, rows)
    elif kind == "csv":
        Dataset.from_list(rows).to_csv(name)
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(name)
    else:
        Path("data").mkdir()
        write("data/one.jsonl", rows[:4])
        write("data/two.jsonl", rows[4:])
        name = "data"
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", name, "--output_dir", "out", *QUIET]
    assert main([*argv, "--num_train_epochs", "1", "--train_sampling_strategy", "sequential"]) == 0
    write("again.jsonl", rows)
    argv[3], argv[5] = "again.jsonl", "other"
    assert main([*argv, "--num_train_epochs", "1", "--train_sampling_strategy", "sequential"]) == 0
    assert len(values("loss")) == 1 and values("loss") == values("loss", "other")
    assert values("num_tokens") == values("num_tokens", "other")


def test_yaml_and_the_flags_that_win_over_it(model_folder, capsys, caplog):
    caplog.set_level("INFO", "posttrain")
    write("short.jsonl", texts(9))
    write("pairs.jsonl", pairs(9))
    Path("run.yaml").write_text(f"""\
model_name_or_path: {model_folder}
datasets:
- path: short.jsonl
  weight: 2
- path: pairs.jsonl
  weight: 1
output_dir: out
max_steps: 9
learning_rate: 1.0e-3
lr_scheduler_type: constant
per_device_train_batch_size: 4
max_length: 64
test_split_size: 3
eval_strategy: steps
eval_steps: 1
logging_steps: 1
use_cpu: true
report_to: none
disable_tqdm: true
env:
  FROM_THE_FILE: "yes"
""")
    try:
        assert main(["--config", "run.yaml", "--max_steps", "2"]) == 0
        assert os.environ["FROM_THE_FILE"] == "yes"
    finally:
        os.environ.pop("FROM_THE_FILE", None)
    assert len(values("loss")) == len(values("eval_loss")) == 2
    assert values("learning_rate") == [1e-3, 1e-3]
    # All nine of the first, and half as many of the second, less those held out.
    assert re.search(r"train: (10|11) rows", caplog.text) and "eval: 3 rows" in caplog.text
    assert "saved to" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained("out")


def test_a_share_is_held_out(model_folder, capsys, caplog):
    caplog.set_level("INFO", "posttrain")
    write("rows.jsonl", texts(20))
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "rows.jsonl", "--output_dir", "out", *QUIET]
    options = ["--test_split_size", "0.2", "--eval_strategy", "epoch", "--num_train_epochs", "1"]
    assert main([*argv, *options]) == 0
    assert capsys.readouterr().out.count("'eval_loss'") == 1
    assert "train: 16 rows" in caplog.text and "eval: 4 rows" in caplog.text


def test_an_adapter_from_the_command_line(model_folder, caplog):
    pytest.importorskip("peft")
    write("rows.jsonl", chats(8))
    argv = ["--model_name_or_path", str(model_folder), "--dataset_name", "rows.jsonl", "--output_dir", "out", *QUIET]
    assert main([*argv, "--use_peft", "--lora_r", "4", "--max_steps", "1"]) == 0
    assert json.loads(Path("out/adapter_config.json").read_text())["r"] == 4
    argv[1], argv[5] = "out", "next"
    assert "no effect without use_peft" not in caplog.text
    assert main([*argv, "--max_steps", "1", "--packing", "--lora_alpha", "8"]) == 0
    assert "no effect without use_peft" in caplog.text
    assert Path("next/adapter_model.safetensors").exists() and not Path("next/model.safetensors").exists()


# ---- The plan ----


def test_the_plan(model_folder, no_weights, capsys):
    posttrain = pytest.importorskip("posttrain.command")
    write("rows.jsonl", pairs(20))
    argv = ["--dataset_name", "rows.jsonl", "--use_cpu", "--per_device_train_batch_size", "2", "--max_shapes", "2"]
    more = ["--gradient_accumulation_steps", "3", "--pad_to_multiple_of", "8", "--num_train_epochs", "2"]
    assert posttrain.main(["plan", "sft", "--model_name_or_path", str(no_weights), *argv, *more]) == 0
    said = capsys.readouterr().out
    assert "2 rows a device x 3 accumulated x 1 devices = 6 rows a step; 20 rows, 4 steps an epoch, 8 steps" in said
    assert re.search(r"widths \d+, \d+", said) and "GiB of weights" in said
    assert said.count("\nrow ") == 3 and "river is« river<|im_end|>»" in said
    assert not Path("trainer_output").exists() and not list(Path().glob("*SFT*"))


def test_the_plan_of_an_adapter_and_its_mistakes(no_weights, capsys, tmp_path):
    posttrain = pytest.importorskip("posttrain.command")
    pytest.importorskip("peft")
    write("rows.jsonl", texts(4))
    argv = ["plan", "sft", "--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl", "--use_cpu"]
    assert posttrain.main([*argv, "--use_peft"]) == 0
    capsys.readouterr()
    write("rows.jsonl", [{"txt": "a"}])
    assert posttrain.main(argv) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: train: row 0" in line and "'txt'" in line


def test_the_plan_of_the_demonstration(capsys):
    posttrain = pytest.importorskip("posttrain.command")
    assert posttrain.main(["plan", "sft", "--use_cpu"]) == 0
    assert "16 rows" in capsys.readouterr().out


# ---- As a program ----


def test_without_arguments_a_tiny_model_learns(tmp_path):
    done = process("-m", "posttrain_sft", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.search(r"^loss +(.+)$", done.stdout, re.MULTILINE)[1].split(" -> ")]
    assert losses[-1] < 0.3 < 1.5 < losses[0] and losses == sorted(losses, reverse=True)
    before, after = (re.search(rf"^{word} +'(.*)'$", done.stdout, re.MULTILINE)[1] for word in ("before", "after"))
    assert after == "The capital of France is Paris." != before
    assert list(tmp_path.iterdir()) == []


QUICK_START = """
from datasets import load_dataset
from posttrain import SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
"""


def test_the_quick_start_runs_as_it_stands(tied_folder, tmp_path):
    module = "posttrain" if find_spec("posttrain") else "posttrain_sft"
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen/Qwen3-0.6B").symlink_to(tied_folder)
    (tmp_path / "trl-lib/Capybara").mkdir(parents=True)
    write(tmp_path / "trl-lib/Capybara/train.jsonl", [{"source": "made", **row} for row in chats(16)])
    done = process("-c", QUICK_START.replace("posttrain import", f"{module} import"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (checkpoint,) = (tmp_path / "Qwen3-0.6B-SFT").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-6"  # three epochs of 16 rows, 8 a step
    assert "train: 16 rows" in done.stderr and "shapes on cpu" in done.stderr


@pytest.mark.slow
def test_two_processes(model_folder, tmp_path):
    write(tmp_path / "rows.jsonl", texts(32))
    argv = ["--model_name_or_path", model_folder, "--dataset_name", "rows.jsonl", "--output_dir", "out", *QUIET]
    done = process("-m", "posttrain_sft", *argv, "--nproc_per_node", "2", "--max_steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(values("loss", tmp_path / "out")) == 2
    write(tmp_path / "rows.jsonl", [{"txt": "a"}])
    done = process("-m", "posttrain_sft", *argv, "--nproc_per_node", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "row 0" in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr

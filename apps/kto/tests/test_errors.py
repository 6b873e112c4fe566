"""What cannot be trained is refused before weights are loaded: the model folders here have none."""

import pytest
from app_runs import check_refused
from kto_runs import config, feedback, trainer
from posttrain_kto import KTOConfig, KTOTrainer
from posttrain_kto.command import main


def refused(no_weights, *wanted, rows=None, extras=None, **options):
    rows = feedback(2) if rows is None else rows
    check_refused(lambda: trainer(rows, None, str(no_weights), extras=extras, **options), *wanted)


def test_without_a_mistake_the_weights_are_what_is_missing(no_weights):
    with pytest.raises(ValueError, match=r"cannot be loaded.*model\.safetensors"):
        trainer(feedback(2), None, str(no_weights))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([*feedback(1), {"prompt": "a", "completion": "b"}], ["train: row 1", "'label'"]),
        ([{"prompt": "a", "completion": "b", "label": "good"}], ["row 0", "'label'", "'good'"]),
        ([{"prompt": "a", "completion": 5, "label": True}], ["row 0", "'completion'", "5 (int)"]),
        ([{"prompt": "x " * 99, "completion": "a", "label": True}], ["train", "max_length"]),
        ([], ["train", "empty"]),
        ("rows.jsonl", ["train", "str"]),
    ],
)
def test_rows(rows, wanted, no_weights):
    refused(no_weights, *wanted, rows=rows)


def test_evaluation_rows_and_streams(no_weights):
    refused(no_weights, "eval", "row 0", extras={"eval_dataset": [{"prompt": "a"}]})
    refused(no_weights, "eval_strategy='steps'", "eval_dataset", eval_strategy="steps")
    with pytest.raises(ValueError, match="train_dataset"):
        KTOTrainer(str(no_weights), args=config())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"loss_type": "kot"}, ["loss_type", "'kot'", "apo_zero_unpaired"]),
        ({"desirable_weight": -1.0}, ["desirable_weight=-1.0"]),
        ({"undesirable_weight": -1.0}, ["undesirable_weight=-1.0"]),
        ({"beta": 0.0}, ["beta=0.0"]),
    ],
)
def test_options(options, wanted):
    with pytest.raises(ValueError) as caught:
        KTOConfig("out", use_cpu=True, **options)
    for words in wanted:
        assert words in str(caught.value), caught.value


def test_on_the_command_line_a_mistake_is_one_line(no_weights, capsys):
    with open("rows.jsonl", "w") as file:
        file.write('{"prompt": "a", "completion": "b"}\n')
    for words, wanted in (
        (["--dataset_name", "rows.jsonl"], "model_name_or_path is missing"),
        (["--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl"], "'label'"),
        (["--max_prompt_length", "5"], "max_length"),
    ):
        assert main([*words, "--use_cpu", "--report_to", "none"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert wanted in line

"""What cannot be trained is refused before weights are loaded: the model folders here have none."""

import json

import pytest
from app_runs import check_refused
from datasets import Dataset
from posttrain_models import tiny_model
from posttrain_reward import RewardConfig, RewardTrainer
from posttrain_reward.command import main
from reward_runs import config, texts, trainer
from transformers import AutoModelForSequenceClassification

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def refused(no_weights, *wanted, rows=None, extras=None, **options):
    rows = texts(2) if rows is None else rows
    check_refused(lambda: trainer(rows, None, str(no_weights), extras=extras, **options), *wanted)


def test_without_a_mistake_the_weights_are_what_is_missing(no_weights):
    with pytest.raises(ValueError, match=r"cannot be loaded.*model\.safetensors"):
        trainer(texts(2), None, str(no_weights))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([*texts(1), {"prompt": "a", "choosen": "b", "rejected": "c"}], ["train: row 1", "'chosen'", "'choosen'"]),
        ([{"prompt": "a", "chosen": "b"}], ["row 0", "'rejected'"]),
        ([{"prompt": "a", "chosen": 5, "rejected": "c"}], ["row 0", "'chosen'", "5 (int)"]),
        ([{"prompt": "a", "chosen": None, "rejected": "c"}], ["row 0", "'chosen'"]),
        ([{"prompt": [USER], "chosen": [REPLY], "rejected": "no"}], ["row 0", "'rejected'"]),
        ([{"prompt": [USER], "chosen": [], "rejected": [REPLY]}], ["row 0", "'chosen'"]),
        ([{**texts(1)[0], "margin": "much"}], ["row 0", "'margin'"]),
        ([{"text": "a b"}], ["row 0", "'text'", "'chosen'"]),
        ([], ["train", "empty"]),
    ],
)
def test_rows(rows, wanted, no_weights):
    refused(no_weights, *wanted, rows=rows)


def test_data_sets(no_weights):
    stream = Dataset.from_list(texts(3)).to_iterable_dataset()
    refused(no_weights, "max_steps", rows=stream, max_steps=-1)
    refused(no_weights, "max_length", rows=[{"prompt": "x " * 99, "chosen": "y", "rejected": "z"}])
    refused(no_weights, "eval", "row 0", extras={"eval_dataset": [{"prompt": "a"}]})
    refused(no_weights, "eval_strategy='steps'", "eval_dataset", eval_strategy="steps")
    with pytest.raises(ValueError, match="train_dataset"):
        RewardTrainer(str(no_weights), args=config())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"max_length": 1}, "max_length"),
        ({"center_rewards_coefficient": -1.0}, "center_rewards_coefficient"),
        ({"model_init_kwargs": "[1]"}, "model_init_kwargs"),
        ({"label_smoothing_factor": 0.1}, "margin"),
        ({"pad_token": "<pad>"}, "processing_class"),
    ],
    ids=str,
)
def test_the_config_refuses(options, wanted):
    with pytest.raises(ValueError, match=wanted):
        RewardConfig("out", use_cpu=True, **options)


def test_options_that_contradict_each_other(no_weights):
    refused(no_weights, "eos_token='<no>'", eos_token="<no>")
    refused(no_weights, "none.jinja", chat_template_path="none.jinja")


def test_models_that_are_none(tokenizer, tmp_path):
    model = tiny_model("llama", vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no reward head"):
        trainer(texts(2), tokenizer, model)
    model.config.num_labels = 3
    with pytest.raises(ValueError, match="num_labels=3"):
        trainer(texts(2), tokenizer, AutoModelForSequenceClassification.from_config(model.config))
    for model, wanted in ((None, "model"), (5, "int"), (str(tmp_path / "none"), "none")):
        with pytest.raises(ValueError, match=wanted):
            RewardTrainer(model, args=config(), train_dataset=texts(2), processing_class=tokenizer)


def test_an_adapter_that_would_leave_the_new_head_as_it_was_drawn(model_folder):
    peft = pytest.importorskip("peft")
    extras = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])}
    with pytest.raises(ValueError, match="SEQ_CLS"):
        trainer(texts(2), None, str(model_folder), extras=extras)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("cut.jsonl", "".join(json.dumps(row) + "\n" for row in texts(3))[:-8], ["cut.jsonl", "line 3"]),
        ("columns.jsonl", json.dumps({"prompt": "a", "chosen": "b"}) + "\n", ["row 0", "'rejected'"]),
        ("missing.jsonl", None, ["missing.jsonl", "no such file"]),
    ],
)
def test_files(name, content, wanted, capsys, no_weights, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    argv = ["--model_name_or_path", str(no_weights), "--dataset_name", name, "--output_dir", "out", "--use_cpu"]
    code = main(argv)
    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said, said
    line = said.strip().splitlines()[-1]
    assert ": error: " in line and all(words in line for words in wanted), line

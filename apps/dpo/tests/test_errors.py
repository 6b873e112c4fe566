"""What cannot be trained is refused before weights are loaded: the model folders here have none."""

import re

import pytest
from app_runs import QUIET, check_refused, write
from dpo_runs import config, pairs, trainer
from posttrain_cli import CommandError, load
from posttrain_dpo import DPOConfig, DPOTrainer
from posttrain_dpo.command import COMMAND, main
from posttrain_models import LoadOptions, LoraOptions, tiny_model

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}


def refused(no_weights, *wanted, rows=None, extras=None, **options):
    rows = pairs(2) if rows is None else rows
    check_refused(lambda: trainer(rows, None, str(no_weights), extras=extras, **options), *wanted)


def test_without_a_mistake_the_weights_are_what_is_missing(no_weights):
    with pytest.raises(ValueError, match=r"cannot be loaded.*model\.safetensors"):
        trainer(pairs(2), None, str(no_weights))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([*pairs(1), {"prompt": "a", "chosen": "b"}], ["train: row 1", "'rejected'"]),
        ([{"prompt": "a", "chosen": 5, "rejected": "c"}], ["row 0", "'chosen'", "5 (int)"]),
        ([{"prompt": [USER], "chosen": "b", "rejected": [REPLY]}], ["row 0", "'prompt'"]),
        ([{"prompt": [USER], "chosen": [REPLY], "rejected": [{"role": "assistant"}]}], ["row 0", "rejected[0]"]),
        ([{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"}], ["row 0", "'margin'"]),
        ([{"prompt": "x " * 99, "chosen": "a", "rejected": "b"}], ["train", "max_length"]),
        ([], ["train", "empty"]),
        ([{"text": "a"}], ["row 0", "'text'"]),
        ("rows.jsonl", ["train", "str"]),
    ],
)  # fmt: skip
def test_rows(rows, wanted, no_weights):
    refused(no_weights, *wanted, rows=rows)


def test_evaluation_rows_and_streams(no_weights):
    refused(no_weights, "eval", "row 0", extras={"eval_dataset": [{"prompt": "a"}]})
    refused(no_weights, "eval b", "row 0", extras={"eval_dataset": {"a": pairs(1), "b": [{"x": "b"}]}})
    refused(no_weights, "eval_strategy='steps'", "eval_dataset", eval_strategy="steps")
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list(pairs()).to_iterable_dataset()
    refused(no_weights, "max_steps", rows=stream, max_steps=-1)
    refused(no_weights, "precompute_ref_log_probs", "stream", rows=stream, precompute_ref_log_probs=True)
    again = {"eval_dataset": {"b": stream}}
    refused(no_weights, "precompute_ref_log_probs", "eval_dataset['b']", extras=again, precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match="train_dataset"):
        DPOTrainer(str(no_weights), args=config())
    for model in (None, 3):
        with pytest.raises(ValueError, match="model must be a name"):
            DPOTrainer(model, train_dataset=pairs(2))


def test_objects_of_the_wrong_kind_and_references_that_are_not_there(no_weights, tokenizer):
    refused(no_weights, "callbacks[0]=5", extras={"callbacks": [5]})
    refused(no_weights, "compute_metrics=3", extras={"compute_metrics": 3})
    refused(no_weights, "/nowhere/at/all", "does not exist", extras={"ref_model": "/nowhere/at/all"})
    refused(no_weights, "ref_model names no model", extras={"ref_model": LoadOptions()})
    made = trainer(pairs(2), tokenizer)
    with pytest.raises(ValueError, match="'abc' names no evaluation set"):
        made.evaluate("abc")


def test_a_revision_is_one_of_the_model_that_is_trained(model_folder, monkeypatch):
    asked, load_policy = [], DPOTrainer.load

    def spy(name, options=None, **arguments):
        asked.append(arguments["model_init_kwargs"])
        return load_policy(name, options, **arguments)

    monkeypatch.setattr(DPOTrainer, "load", staticmethod(spy))
    given = {"revision": "main", "low_cpu_mem_usage": True}
    trainer(pairs(2), None, str(model_folder), extras={"ref_model": str(model_folder)}, model_init_kwargs=given)
    assert asked == [given, {"low_cpu_mem_usage": True}]


def test_what_an_adapter_cannot_do_is_said_before_weights_are_loaded(no_weights):
    refused(no_weights, "sync_ref_model", extras={"peft_config": LoraOptions(use_peft=True)}, sync_ref_model=True)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--sync_ref_model", "--use_peft"], "sync_ref_model"),
        (["--precompute_ref_log_probs", "--dataset_streaming", "--max_steps", "2"], "precompute_ref_log_probs"),
        (["--dataset_streaming", "--max_steps", "-1"], "max_steps"),
        (["--eval_strategy", "steps"], "test_split_size"),
        (["--router_aux_loss_coef", "0.1"], "mixtures of experts"),
        (["--output_dir", "rows.jsonl"], "output_dir"),
    ],
)  # fmt: skip
def test_a_plan_refuses_what_training_refuses(words, wanted, no_weights):
    write("rows.jsonl", pairs(4))
    parsed = COMMAND.parse([*QUIET, "--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl", *words])
    with pytest.raises(CommandError, match=wanted):
        load(COMMAND.plan)(*parsed.build(), world_size=1)


def test_a_plan_counts_evaluation_rows(no_weights, capsys):
    write("rows.jsonl", [*pairs(4), {"prompt": "a " * 30, "chosen": "b", "rejected": "c"}])
    words = ["--test_split_size", "1", "--eval_strategy", "epoch", "--max_shapes", "1", "--seed", "0"]
    for seed in range(9):  # the long row is held out under one of them
        parsed = COMMAND.parse(
            [*QUIET, "--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl", *words[:-1], str(seed)]
        )
        assert load(COMMAND.plan)(*parsed.build(), world_size=1) == 0
    widths = set(re.findall(r"widths? (\d+)", capsys.readouterr().out))
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"loss_type": ["sigmod"]}, ["loss_type", "'sigmod'", "sigmoid"]),
        ({"loss_type": []}, ["loss_type", "empty"]),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, ["loss_weights", "1 entries", "2 losses"]),
        ({"loss_type": ["exo_pair"]}, ["label_smoothing", "exo_pair"]),
        ({"label_smoothing": 0.5}, ["label_smoothing=0.5"]),
        ({"f_divergence_type": "kl"}, ["f_divergence_type", "reverse_kl"]),
        ({"f_divergence_type": "js_divergence", "loss_type": ["nca_pair"]}, ["f_divergence_type", "nca_pair"]),
        ({"ld_alpha": 1.5}, ["ld_alpha=1.5"]),
        ({"use_weighting": True, "loss_type": ["aot"]}, ["use_weighting", "aot"]),
        ({"beta": 0.0}, ["beta=0.0"]),
        ({"beta": float("nan")}, ["beta=nan"]),
        ({"discopop_tau": 0.0}, ["discopop_tau=0.0"]),
        ({"max_length": 1}, ["max_length"]),
        ({"truncation_mode": "middle"}, ["truncation_mode", "keep_end"]),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, ["sync_ref_model", "precompute_ref_log_probs"]),
        ({"ref_model_mixup_alpha": 0.0}, ["ref_model_mixup_alpha=0.0"]),
        ({"ref_model_sync_steps": 0}, ["ref_model_sync_steps=0"]),
        ({"precompute_ref_batch_size": 0}, ["precompute_ref_batch_size=0"]),
        ({"pad_token": "x"}, ["pad_token", "tokenizer.pad_token"]),
        ({"label_smoothing_factor": 0.1}, ["label_smoothing_factor"]),
        ({"router_aux_loss_coef": -1.0}, ["router_aux_loss_coef"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_options(options, wanted):
    with pytest.raises(ValueError) as caught:
        DPOConfig("out", use_cpu=True, **options)
    for words in wanted:
        assert words in str(caught.value), caught.value


def test_models_that_cannot_be(no_weights, tokenizer):
    refused(no_weights, "mixtures of experts", router_aux_loss_coef=0.1)
    refused(no_weights, "max_shapes", "pad_to_multiple_of", max_shapes=2, pad_to_multiple_of=None)
    refused(no_weights, "ref_model", "int", extras={"ref_model": 5})
    model = tiny_model("llama", vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="ref_model is the model that is trained"):
        trainer(pairs(2), tokenizer, model, extras={"ref_model": model})
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"sync_ref_model=True.*without an adapter"):
        trainer(pairs(2), tokenizer, model, extras={"peft_config": LoraOptions(use_peft=True)}, sync_ref_model=True)


def test_on_the_command_line_a_mistake_is_one_line(no_weights, capsys):
    (line,) = said(capsys, "--dataset_name", "rows.jsonl")
    assert "model_name_or_path is missing" in line
    (line,) = said(capsys, "--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl")
    assert "rows.jsonl" in line
    with open("rows.jsonl", "w") as file:
        file.write('{"prompt": "a", "chosen": "b"}\n')
    (line,) = said(capsys, "--model_name_or_path", str(no_weights), "--dataset_name", "rows.jsonl")
    assert "row 0" in line and "'rejected'" in line
    (line,) = said(capsys, "--max_prompt_length", "5")
    assert "max_length" in line


def said(capsys, *words):
    assert main([*words, "--use_cpu", "--report_to", "none"]) == 2
    return [line for line in capsys.readouterr().err.splitlines() if "error:" in line]

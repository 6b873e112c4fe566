"""What is trained: the numbers, the rows, the saved model."""

import json
import math
from pathlib import Path

import pytest
import torch
from app_runs import assert_same, logged, losses, parameters, step_gradient
from datasets import Dataset
from posttrain_collators import PreferenceCollator
from posttrain_models import choose_layout, unwrap
from posttrain_models.rewards import tiny_reward_model
from posttrain_reward import Reward
from reward_runs import Reference, chats, rewards, texts, trainer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

METRICS = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")


def check_against_reference(made, tolerance=2e-5):
    """One step over all rows: loss, metrics and gradient against float64."""
    before = parameters(made)
    reference = Reference(made.model, made.train_dataset, center=made.args.center_rewards_coefficient or 0.0)
    made.train()
    (loss,) = losses(made)
    assert loss == pytest.approx(reference.loss, abs=tolerance)
    for name in METRICS:
        assert logged(made, name) == [pytest.approx(reference.metrics[name], abs=tolerance)], name
    assert logged(made, "num_tokens") == [reference.tokens]
    assert_same(reference.gradient, step_gradient(before, parameters(made)), 5e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3},
        {"padding_free": True},
        {"padding_free": False},
        {"padding_free": False, "pad_to_multiple_of": 16},
        {"max_shapes": 2},
        {"gradient_checkpointing": True},
        {"center_rewards_coefficient": 0.3, "gradient_accumulation_steps": 3},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()) or "default",
)
def test_loss_metrics_and_gradient_equal_a_float64_reference(options, tokenizer):
    check_against_reference(trainer(texts(), tokenizer, **{"per_device_train_batch_size": 64, **options}))


def test_margins(tokenizer):
    rows = [{**row, "margin": 0.25 * number} for number, row in enumerate(texts(6))]
    made = trainer(rows, tokenizer, per_device_train_batch_size=6)
    assert [row["margin"] for row in made.train_dataset] == [row["margin"] for row in rows]
    check_against_reference(made)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_layouts_and_fillers(layout, tokenizer):
    model = tiny_reward_model("llama", vocab_size=len(tokenizer)).eval()
    rows = [
        {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10]},
        {"prompt_ids": [5], "chosen_ids": [8], "rejected_ids": [10, 11, 12]},
    ]
    assert choose_layout(model, layout).name == layout
    batch, method = PreferenceCollator(0)(rows, size=4), Reward(0.1)
    total, metrics = method.loss(model, batch)
    wanted = Reference(model, rows, center=0.1)
    assert int(method.count(batch)) == 2
    assert float(total.detach()) == pytest.approx(2 * wanted.loss, abs=2e-5)
    assert {name: metrics[name].compute() for name in METRICS} == pytest.approx(wanted.metrics, abs=2e-5)
    empty = PreferenceCollator(0)([], size=2)
    total, metrics = method.loss(model, empty)
    total.backward()
    assert float(total.detach()) == 0.0 and math.isnan(metrics["accuracy"].compute())


def test_a_step_does_not_depend_on_how_it_is_split(tokenizer):
    def run(size, accumulation):
        made = trainer(
            texts(40),
            tokenizer,
            max_steps=3,
            learning_rate=0.1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy="random",
        )
        made.train()
        return losses(made), parameters(made)

    first, weights = run(16, 1)
    assert len(first) == 3
    for size, accumulation in ((4, 4), (2, 8), (8, 2)):
        other, found = run(size, accumulation)
        assert other == pytest.approx(first, abs=1e-5)
        assert_same(weights, found, 5e-6)


def test_evaluation_equals_a_float64_reference(tokenizer):
    rows = chats(7)
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "learning_rate": 0.0}
    made = trainer(texts(4), tokenizer, extras={"eval_dataset": rows}, **options)
    reference = Reference(made.model, made.eval_dataset)
    made.train()
    assert logged(made, "eval_loss") == [pytest.approx(reference.loss, abs=2e-5)]
    for name in METRICS:
        assert logged(made, f"eval_{name}") == [pytest.approx(reference.metrics[name], abs=2e-5)], name
    assert made.evaluate(rows)["eval_loss"] == pytest.approx(reference.loss, abs=2e-5)
    several = trainer(texts(4), tokenizer, extras={"eval_dataset": {"a": rows[:3], "b": rows}})
    assert several.evaluate()["eval_b_loss"] == pytest.approx(reference.loss, abs=2e-5)


def test_compute_metrics_and_predictions_see_rewards(tokenizer):
    def metrics(prediction):
        better = prediction.predictions.argmax(1) == prediction.label_ids
        return {"better": float(better.mean())}

    extras = {"eval_dataset": chats(5), "compute_metrics": metrics}
    made = trainer(texts(4), tokenizer, extras=extras, per_device_eval_batch_size=2)
    found = made.evaluate()
    assert found["eval_better"] == pytest.approx(found["eval_accuracy"])
    predicted = made.predict(chats(5))
    with torch.no_grad():
        wanted = rewards(unwrap(made.model).eval(), made.eval_dataset)
    torch.testing.assert_close(torch.tensor(predicted.predictions), wanted, atol=1e-5, rtol=0)
    assert predicted.label_ids.tolist() == [0] * 5


# ---- Rows ----

USER, GOOD, BAD = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four"},
    {"role": "assistant", "content": "five"},
)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "2+2 is", "chosen": " four", "rejected": " five"}, (" four<|im_end|>", " five<|im_end|>")),
        ({"chosen": "2+2 is four", "rejected": "2+2 is five"}, None),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, ("four<|im_end|>", "five<|im_end|>")),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ("four<|im_end|>", "five<|im_end|>")),
        (
            {
                "conversations": [{"from": "human", "value": "2+2?"}],
                "chosen": {"from": "gpt", "value": "four"},
                "rejected": {"from": "gpt", "value": "five"},
            },
            ("four<|im_end|>", "five<|im_end|>"),
        ),
    ],
    ids=["strings", "implicit strings", "messages", "implicit messages", "ShareGPT"],
)
def test_formats(row, wanted, tokenizer):
    made = trainer([row, row], tokenizer)
    first = made.train_dataset[0]
    sides = [tokenizer.decode(first[name]).removesuffix("\n") for name in ("chosen_ids", "rejected_ids")]
    whole = [tokenizer.decode([*first["prompt_ids"], *first[name]]) for name in ("chosen_ids", "rejected_ids")]
    assert "four" in whole[0] and "five" in whole[1] and "2+2" in tokenizer.decode(first["prompt_ids"])
    if wanted is not None:
        assert tuple(sides) == wanted
    made.train()
    assert 0 < losses(made)[0] < 3


def test_rows_that_are_tokens_already_with_and_without_prompt(tokenizer):
    rows = [{"chosen_ids": [5, 6, 7, 8], "rejected_ids": [5, 6, 9]}, {"chosen_ids": [5], "rejected_ids": [6, 7]}]
    check_against_reference(trainer(rows, tokenizer, per_device_train_batch_size=2))
    rows = [{"prompt_ids": [5, 6], **row} for row in rows]
    check_against_reference(trainer(rows, tokenizer, per_device_train_batch_size=2))


def test_pairs_with_a_side_that_is_too_long_are_left_out(tokenizer, caplog):
    caplog.set_level("INFO", "posttrain")
    long = {**texts(1)[0], "rejected": " " + "river " * 40}
    made = trainer([*texts(3), long], tokenizer, max_length=40)
    assert len(made.train_dataset) == 3
    assert "1 dropped" in caplog.text
    assert len(trainer([*texts(3), long], tokenizer, max_length=None).train_dataset) == 4


def test_a_stream_trains_like_the_list_that_it_is(tokenizer):
    options = {"max_steps": 3, "learning_rate": 0.1, "per_device_train_batch_size": 4}
    one = trainer(texts(12), tokenizer, **options)
    other = trainer(Dataset.from_list(texts(12)).to_iterable_dataset(), tokenizer, **options)
    one.train(), other.train()
    assert losses(other) == pytest.approx(losses(one), abs=1e-5)
    assert_same(parameters(one), parameters(other), 5e-6)


# ---- The model ----


def test_a_language_model_gets_a_head_and_the_saved_model_is_a_reward_model(model_folder, tokenizer):
    made = trainer(chats(), None, str(model_folder), max_steps=20, optim="adamw_torch", learning_rate=5e-3)
    assert unwrap(made.model).config.num_labels == 1
    made.train()
    assert losses(made)[-1] < 0.3 < losses(made)[0]
    assert logged(made, "accuracy")[-1] == 1.0
    made.save_model()
    model = AutoModelForSequenceClassification.from_pretrained("out")
    assert model.dtype == torch.float32 and model.config.num_labels == 1
    assert AutoTokenizer.from_pretrained("out").chat_template == tokenizer.chat_template
    row = made.train_dataset[0]
    ids = torch.tensor([[*row["prompt_ids"], *row["chosen_ids"]]])
    with torch.no_grad():
        wanted = rewards(unwrap(made.model).eval(), [row])[0, 0]
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert found.shape == (1, 1) and float(found) == pytest.approx(float(wanted), abs=1e-5)
    card = Path("out/README.md").read_text()
    assert "with Reward" in card and "= AutoModelForSequenceClassification.from_pretrained(" in card
    again = trainer(chats(), None, "out", learning_rate=0.0)
    again.train()
    assert losses(again)[0] == pytest.approx(Reference(again.model, list(again.train_dataset)[:4]).loss, abs=2e-5)
    assert losses(again)[0] < 0.3


def test_the_new_head_is_the_same_in_every_run(model_folder):
    first, second = (
        unwrap(trainer(chats(2), None, str(model_folder), seed=seed).model).score.weight for seed in (1, 2)
    )
    assert torch.equal(first, second) and float(first.detach().abs().sum()) > 0


def test_an_adapter_trains_with_the_head_and_loads(model_folder, tokenizer):
    peft = pytest.importorskip("peft")
    from posttrain_models import LoraOptions

    extras = {"peft_config": LoraOptions(use_peft=True, lora_r=4, lora_dropout=0.0)}
    made = trainer(
        chats(), None, str(model_folder), extras=extras, max_steps=12, optim="adamw_torch", learning_rate=2e-2
    )
    before = parameters(made)
    made.train()
    changed = {name for name, value in parameters(made).items() if not torch.equal(value, before[name])}
    assert losses(made)[-1] < losses(made)[0]
    assert changed and all("lora_" in name or "score" in name for name in changed)
    assert any("score" in name for name in changed)
    made.save_model()
    assert json.loads(Path("out/adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    assert "AutoPeftModelForSequenceClassification.from_pretrained(" in Path("out/README.md").read_text()
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained("out", num_labels=1)
    row = made.train_dataset[0]
    with torch.no_grad():
        wanted = made.predict([row]).predictions
        ids = torch.tensor([[*row["prompt_ids"], *row["chosen_ids"]]])
        found = loaded(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert float(found) == pytest.approx(float(wanted[0, 0]), abs=1e-5)
    again = trainer(chats(), None, "out", max_steps=1)
    assert_same(
        {name: value for name, value in parameters(made).items() if "lora_" in name or "score" in name},
        {name: value for name, value in parameters(again).items() if "lora_" in name or "score" in name},
        0,
    )


def test_a_resumed_run_is_the_run_that_was_not(tokenizer):
    settings = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
    }
    whole = trainer(texts(10), tokenizer, train_sampling_strategy="random", **settings)
    whole.train()
    again = trainer(texts(10), tokenizer, train_sampling_strategy="random", **settings)
    again.train(resume_from_checkpoint="out/checkpoint-2")
    assert_same(parameters(whole), parameters(again), 0)
    assert losses(whole) == losses(again)

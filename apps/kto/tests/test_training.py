"""Whole training steps, against full float64 logits and against themselves in other forms."""

import math

import pytest
import torch
from app_runs import assert_same, check_static_shapes, double, logged, parameters, plain_logps
from kto_runs import feedback, trainer
from posttrain_collators import FeedbackCollator
from posttrain_kto import KTO
from posttrain_kto.method import KTOExtras, Margin
from posttrain_kto.mismatch import givers, mismatched
from posttrain_models import LoraOptions, tiny_model
from posttrain_models.references import AdapterOff, FrozenModel
from posttrain_trainer import Anchor
from posttrain_trainer.ranks import Ranks

LAYOUTS = {"shared": {}, "packed": {}, "padded": {"padding_free": False}, "fixed": {"max_shapes": 1}}

METRICS = {
    "loss", "kl", "entropy", "num_tokens", "rewards/chosen", "rewards/rejected", "rewards/margins",
    "rewards/accuracies", "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected",
}  # fmt: skip

ONE = Ranks(0, 1, 1, torch.device("cpu"))


def in_layout(monkeypatch, layout):
    """Options that make a run take a layout; `packed` is what models run that cannot share a prompt."""
    if layout == "packed":
        monkeypatch.setattr("posttrain_models.layout._unshared", lambda base: "the test says so")
    return LAYOUTS[layout]


def other_model(tokenizer):
    return {"ref_model": tiny_model("llama", vocab_size=len(tokenizer), seed=1)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_first_loss_with_the_model_itself_as_reference(layout, loss, tokenizer, monkeypatch):
    made = trainer(feedback(), tokenizer, loss_type=loss, **in_layout(monkeypatch, layout))
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert logged(made, "kl") == ([pytest.approx(0, abs=1e-5)] if loss == "kto" else [])


def test_layouts_give_one_step(tokenizer, monkeypatch):
    found = {}
    for layout in LAYOUTS:
        with monkeypatch.context() as patch:
            made = trainer(feedback(), tokenizer, extras=other_model(tokenizer), **in_layout(patch, layout))
            assert made.method.share_prompts == (layout == "shared")
            made.train()
        found[layout] = made
    for layout, made in found.items():
        assert_same(parameters(made), parameters(found["padded"]))
        for name in METRICS:
            assert logged(made, name) == pytest.approx(logged(found["padded"], name), abs=2e-5), (layout, name)


def reference_step(made, rows, beta, desirable, undesirable):
    """Loss, KL and gradients of one step from full float64 logits; row i is mismatched with the row before it."""
    policy, reference = double(made.model), double(made.method.reference.model)

    def ratio(prompt, completion):
        with torch.no_grad():
            before = plain_logps(reference, prompt, completion).sum()
        return plain_logps(policy, prompt, completion).sum() - before

    prompts, completions = ([list(row[name]) for row in rows] for name in ("prompt_ids", "completion_ids"))
    with torch.no_grad():
        others = [ratio(prompts[i], completions[i - 1]) for i in range(len(rows))]
    kl = max(float(sum(others)) / len(rows), 0.0)
    total = 0.0
    for row, prompt, completion in zip(rows, prompts, completions, strict=True):
        gain = ratio(prompt, completion) - kl
        good = row["label"]
        total = total + (desirable if good else undesirable) * (1 - torch.sigmoid(beta * (gain if good else -gain)))
    loss = total / len(rows)
    loss.backward()
    return float(loss.detach()), kl, {name: value.grad for name, value in policy.named_parameters()}


@pytest.mark.parametrize("swapped", [False, True])
def test_a_step_is_the_gradient_of_the_plain_formula(swapped, tokenizer):
    """With policy and reference the other way round, the mean is below 0 in one of the two cases, and 0 is taken."""
    models = [tiny_model("llama", vocab_size=len(tokenizer), seed=seed) for seed in ((1, 0) if swapped else (0, 1))]
    options = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    made = trainer(feedback(5), tokenizer, models[0], extras={"ref_model": models[1]},
                   per_device_train_batch_size=8, **options)  # fmt: skip
    loss, kl, gradient = reference_step(made, list(made.train_dataset), *options.values())
    before = parameters(made)
    made.train()
    after = parameters(made)
    assert logged(made, "loss")[0] == pytest.approx(loss, abs=1e-5)
    assert logged(made, "kl")[0] == pytest.approx(kl, abs=1e-4)
    for name, value in gradient.items():
        assert float(((before[name] - after[name]) / 0.1 - value).abs().max()) < 1e-5, name


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("split", [(2, 4), (1, 7), (3, 3)], ids=str)
def test_a_step_does_not_depend_on_how_it_is_split(split, loss, tokenizer):
    """Seven rows: an odd step, unequal shares, and micro-batches of one row."""
    runs = []
    for size, accumulation in ((8, 1), split):
        made = trainer(feedback(7), tokenizer, extras=other_model(tokenizer), loss_type=loss,
                       per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)  # fmt: skip
        made.train()
        runs.append((made, parameters(made)))
    (one, weights), (two, others) = runs
    assert_same(weights, others, 5e-6)
    for name in METRICS - ({"kl"} if loss != "kto" else set()):
        assert logged(one, name) == pytest.approx(logged(two, name), rel=1e-4, abs=1e-5), name


# ---- Mismatched pairs ----


def test_givers_are_the_nearest_rows_with_another_prompt():
    assert givers([b"a", b"b", b"c"]) == [2, 0, 1]
    assert givers([b"a", b"a", b"b", b"b"]) == [3, 3, 1, 1]  # pairs that were taken apart
    assert givers([b"a", b"b", b"a"]) == [1, 0, 1]
    assert givers([b"a"]) == [None] and givers([b"a", b"a"]) == [None, None] and givers([]) == []


def rows_of(*numbers):
    return [{"prompt_ids": [n, n], "completion_ids": [n + 10] * (n % 3 + 1), "label": True} for n in numbers]


def completions(batch):
    return [row[0][mask[0]].tolist() for row, mask in zip(batch.completions, batch.completion_mask, strict=True)]


def test_mismatched_rows_are_those_of_the_step_in_its_order():
    collate = FeedbackCollator(0)
    (whole,) = mismatched([collate(rows_of(1, 2, 3, 4, 5))], ONE)
    expected = [[row["completion_ids"]][0] for row in rows_of(5, 1, 2, 3, 4)]
    assert completions(whole) == expected
    micros = [collate(rows_of(1, 2)), Anchor(collate(rows_of(9))), collate(rows_of(3, 4), size=3), collate(rows_of(5))]
    found = mismatched(micros, ONE)
    assert [completions(batch) for batch in found] == [expected[:2], [[]], [*expected[2:4], []], expected[4:]]


def test_mismatched_rows_over_two_ranks():
    """Micro-batch m of rank r comes before that of rank r + 1."""
    collate = FeedbackCollator(0)
    shares = [[collate(rows_of(1, 2)), collate(rows_of(5))], [collate(rows_of(3, 4)), Anchor(collate(rows_of(5)))]]
    sent = []

    class Recording(Ranks):
        def gather(self, value):
            sent.append(value)
            return [value]

    class Replaying(Ranks):
        def gather(self, value):
            return sent

    for share in shares:
        mismatched(share, Recording(0, 1, 1, torch.device("cpu")))
    found = [mismatched(share, Replaying(rank, 2, 1, torch.device("cpu"))) for rank, share in enumerate(shares)]
    expected = [row["completion_ids"] for row in rows_of(5, 1, 2, 3, 4)]
    assert [completions(batch) for batch in found[0]] == [expected[:2], expected[4:]]
    assert [completions(batch) for batch in found[1]] == [expected[2:4], [[]]]


def test_one_row_has_no_other_and_says_so(tokenizer, caplog):
    made = trainer(feedback(1), tokenizer, extras=other_model(tokenizer))
    made.train()
    assert logged(made, "kl") == [0.0] and math.isfinite(logged(made, "loss")[0])
    assert "rows of two different prompts" in caplog.text


def test_the_loss_prepares_a_batch_that_was_not(tokenizer):
    made = trainer(feedback(4), tokenizer, extras=other_model(tokenizer))
    batch = made.data_collator(list(made.train_dataset))
    (prepared,) = made.method.prepare(made.model, [batch])
    assert isinstance(prepared.extras, KTOExtras)
    loss = made.method.loss(made.model, batch)[0]["loss"], made.method.loss(made.model, prepared)[0]["loss"]
    assert float(loss[0].detach()) == pytest.approx(float(loss[1].detach()), abs=1e-6)


# ---- Around it ----


def test_metrics_have_their_names_and_learning_shows(tokenizer):
    made = trainer(feedback(), tokenizer, extras={"eval_dataset": feedback(5)}, max_steps=4, learning_rate=0.5)
    made.train()
    assert METRICS <= made.state.log_history[0].keys()
    found = made.evaluate()
    assert {f"eval_{name}" for name in METRICS - {"num_tokens"}} <= found.keys()
    assert logged(made, "rewards/margins")[-1] > 0 and logged(made, "loss")[-1] < 0.5


def test_the_margin_is_the_difference_of_the_means():
    values, labels = torch.tensor([1.0, 2.0, 6.0, 100.0]), torch.tensor([True, False, True, True])
    mask = torch.tensor([True, True, True, False])
    whole = Margin.between(values, labels, mask)
    parts = [Margin.between(values[i : i + 1], labels[i : i + 1], mask[i : i + 1]) for i in range(4)]
    assert whole.compute() == 1.5 == (parts[0] + parts[1] + parts[2] + parts[3]).compute()
    assert math.isnan(parts[0].compute())


def test_preference_pairs_are_taken_apart(tokenizer, caplog):
    caplog.set_level("INFO", "posttrain")
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in feedback(4)]
    made = trainer(rows, tokenizer, per_device_train_batch_size=8)
    assert [row["label"] for row in made.train_dataset] == [True, False] * 4
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert "would balance" not in caplog.text


def test_weights_that_do_not_balance_are_said(tokenizer, caplog):
    rows = [{**row, "label": index == 0} for index, row in enumerate(feedback(8))]
    trainer(rows, tokenizer)
    assert "1 rows are labelled good and 7 bad: desirable_weight between 7.00 and 9.33" in caplog.text


def test_the_kinds_of_reference(tokenizer, model_folder):
    pytest.importorskip("peft")
    adapter = {"peft_config": LoraOptions(use_peft=True, lora_r=4)}
    made = trainer(feedback(), tokenizer, extras=adapter, max_steps=2)
    assert isinstance(made.method.reference, AdapterOff)
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(0.5, abs=1e-6)
    named = trainer(feedback(), tokenizer, str(model_folder), extras={"ref_model": str(model_folder)})
    assert isinstance(named.method.reference, FrozenModel)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_precomputed_references_change_nothing(loss, tokenizer):
    options = {"loss_type": loss, "max_steps": 2, "train_sampling_strategy": "random"}
    live = trainer(feedback(), tokenizer, extras=other_model(tokenizer), **options)
    live.train()
    made = trainer(feedback(), tokenizer, extras=other_model(tokenizer), precompute_ref_log_probs=True, **options)
    # Mismatched pairs are made of each step's rows, so no row can carry them.
    assert (made.method.reference is not None) == (loss == "kto")
    made.train()
    assert_same(parameters(live), parameters(made))
    assert logged(made, "loss") == pytest.approx(logged(live, "loss"), abs=2e-6)


def test_resume_is_exact(tokenizer):
    options = {"max_steps": 4, "optim": "adamw_torch", "train_sampling_strategy": "random"}
    whole = trainer(feedback(), tokenizer, save_strategy="steps", save_steps=2, **options)
    whole.train()
    again = trainer(feedback(), tokenizer, **options)
    again.train(resume_from_checkpoint="out/checkpoint-2")
    assert_same(parameters(whole), parameters(again), 0)


def test_in_bfloat16_the_reference_runs_in_it_too(tokenizer):
    made = trainer(feedback(), tokenizer, bf16=True)
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(0.5, abs=1e-6)


def test_compute_metrics_gets_rewards(tokenizer):
    seen = []
    extras = {"eval_dataset": feedback(5), "compute_metrics": lambda found: seen.append(found) or {"mine": 1.0}}
    made = trainer(feedback(), tokenizer, extras=extras, per_device_eval_batch_size=2)
    assert made.evaluate()["eval_mine"] == 1.0
    assert seen[-1].predictions.shape == (5,) and seen[-1].label_ids.tolist() == [1, 0, 1, 0, 1]


def test_the_method_without_a_reference_says_so(tokenizer):
    model = tiny_model("llama", vocab_size=16)
    with pytest.raises(ValueError, match="reference is None"):
        KTO().prepare(model, [FeedbackCollator(0)([{"prompt_ids": [1], "completion_ids": [2], "label": True}])])


def test_on_a_device_with_static_shapes_every_forward_has_a_planned_shape(tokenizer, monkeypatch):
    check_static_shapes(trainer, feedback(7), tokenizer, monkeypatch)

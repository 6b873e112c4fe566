"""Whole training steps, against full float64 logits and against themselves in other forms."""

import math

import pytest
import torch
from app_runs import assert_same, check_static_shapes, double, logged, parameters, plain_logps
from dpo_runs import config, pairs, trainer
from posttrain_dpo import DPO, DPOTrainer
from posttrain_losses.preference import ipo, simpo
from posttrain_models import LoraOptions, tiny_model
from posttrain_models.references import AdapterOff, FrozenModel, NamedAdapter

LN2 = math.log(2)
LAYOUTS = {"shared": {}, "packed": {}, "padded": {"padding_free": False}, "fixed": {"max_shapes": 1}}

METRICS = {
    "loss", "entropy", "num_tokens", "mean_token_accuracy", "rewards/chosen", "rewards/rejected", "rewards/accuracies",
    "rewards/margins", "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected",
}  # fmt: skip


def in_layout(monkeypatch, layout):
    """Options that make a run take a layout; `packed` is what models run that cannot share a prompt."""
    if layout == "packed":
        monkeypatch.setattr("posttrain_models.layout._unshared", lambda base: "the test says so")
    return LAYOUTS[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_loss_is_ln_2_in_every_layout(layout, tokenizer, monkeypatch):
    made = trainer(pairs(), tokenizer, **in_layout(monkeypatch, layout))
    assert made.shape_plan.layout == layout.replace("fixed", "padded")
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(LN2, abs=1e-6)
    assert logged(made, "rewards/margins")[0] == pytest.approx(0, abs=1e-5)


def test_layouts_give_one_step(tokenizer, monkeypatch):
    found = {}
    for layout in LAYOUTS:
        with monkeypatch.context() as patch:
            made = trainer(pairs(), tokenizer, max_steps=2, **in_layout(patch, layout))
            made.train()
        found[layout] = made
    for layout, made in found.items():
        assert_same(parameters(made), parameters(found["padded"]))
        assert logged(made, "loss") == pytest.approx(logged(found["padded"], "loss"), abs=2e-6), layout


def test_a_step_is_the_gradient_of_the_plain_formula(tokenizer):
    model, other = (tiny_model("llama", vocab_size=len(tokenizer), seed=seed) for seed in (0, 1))
    made = trainer(pairs(4), tokenizer, model, extras={"ref_model": other}, beta=0.5)
    policy, reference = double(model), double(other)
    total = 0
    for row in made.train_dataset:
        ratios = []
        for side in ("chosen_ids", "rejected_ids"):
            prompt, completion = list(row["prompt_ids"]), list(row[side])
            with torch.no_grad():
                before = plain_logps(reference, prompt, completion).sum()
            ratios.append(plain_logps(policy, prompt, completion).sum() - before)
        total = total - torch.nn.functional.logsigmoid(0.5 * (ratios[0] - ratios[1]))
    loss = total / 4
    loss.backward()
    before = parameters(made)
    made.train()
    after = parameters(made)
    assert logged(made, "loss")[0] == pytest.approx(float(loss), abs=1e-5)
    for name, value in policy.named_parameters():
        assert float(((before[name] - after[name]) / 0.1 - value.grad).abs().max()) < 1e-5, name


LOSSES = [
    {"loss_type": [name]}
    for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "discopop", "nca_pair", "bco_pair", "sppo_hard",
                 "apo_zero", "apo_down", "simpo", "sft")
] + [
    {"loss_type": ["exo_pair"], "label_smoothing": 0.01},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"f_divergence_type": "js_divergence"},
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    {"ld_alpha": 0.5},
    {"use_weighting": True},
]  # fmt: skip


@pytest.mark.parametrize("options", LOSSES, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_a_step_does_not_depend_on_how_it_is_split(options, tokenizer):
    """Seven rows: the shares are unequal."""
    other = tiny_model("llama", vocab_size=len(tokenizer), seed=1)
    extras = {"ref_model": other}
    runs = []
    for size, accumulation in ((8, 1), (2, 4)):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        made = trainer(pairs(7), tokenizer, extras=extras, learning_rate=0.02, **options, **split)
        made.train()
        runs.append((made, parameters(made)))
    (one, weights), (other_run, others) = runs
    assert logged(one, "loss") == pytest.approx(logged(other_run, "loss"), rel=1e-5, abs=1e-5)
    assert_same(weights, others, 5e-6)
    for name in METRICS - {"loss"}:
        assert logged(one, name) == pytest.approx(logged(other_run, name), rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_losses_that_couple_rows_train(name, tokenizer):
    made = trainer(pairs(), tokenizer, loss_type=name, max_steps=3)
    made.train()
    assert logged(made, "loss")[-1] < logged(made, "loss")[0] == pytest.approx(LN2, abs=1e-6)


def test_metrics_have_their_names_in_training_and_evaluation(tokenizer):
    made = trainer(pairs(), tokenizer, extras={"eval_dataset": pairs(5)}, max_steps=3)
    made.train()
    (first, *_) = made.state.log_history
    assert METRICS <= first.keys()
    found = made.evaluate()
    assert {f"eval_{name}" for name in METRICS - {"num_tokens"}} <= found.keys()
    assert logged(made, "rewards/accuracies")[-1] > 0.5 and logged(made, "loss")[-1] < LN2
    tokens = sum(len(row[name]) for row in list(made.train_dataset)[:4] for name in
                 ("prompt_ids", "chosen_ids", "rejected_ids"))  # fmt: skip
    assert logged(made, "num_tokens")[0] == tokens
    assert made.evaluate(pairs(5))["eval_loss"] == pytest.approx(found["eval_loss"], abs=1e-7)
    assert made.evaluate({"a": pairs(2)}).keys() >= {"eval_a_loss", "eval_a_rewards/margins"}


def test_without_a_reference(tokenizer):
    made = trainer(pairs(), tokenizer, loss_type="simpo", beta=2.0)
    assert made.method.reference is None
    made.train()
    rewards = logged(made, "rewards/chosen")[0], logged(made, "rewards/rejected")[0]
    assert logged(made, "rewards/margins")[0] == pytest.approx(rewards[0] - rewards[1], abs=1e-5)


def test_weights_of_pairs_come_from_the_policys_own_distribution(tokenizer):
    model = tiny_model("llama", vocab_size=len(tokenizer))
    made = trainer(pairs(2), tokenizer, model, loss_type="hinge", use_weighting=True)
    policy, expected = double(model), 0.0
    for row in made.train_dataset:
        weight = 1.0
        for side in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([[*row["prompt_ids"], *row[side]]])
            with torch.no_grad():
                probabilities = policy(ids).logits[0, :-1].softmax(-1)[-len(row[side]) :]
            own = probabilities.gather(1, torch.tensor(row[side])[:, None])[:, 0]
            weight *= float((own.log() - probabilities.square().sum(-1).log()).mean().exp())
        expected += weight / 2  # the hinge is 1 where policy and reference are the same
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(expected, rel=1e-5)


# ---- References ----


def test_the_kinds_of_reference(tokenizer, model_folder):
    pytest.importorskip("peft")
    whole = trainer(pairs(), tokenizer, max_steps=2)
    assert isinstance(whole.method.reference, FrozenModel)
    before = parameters(whole.method.reference.model)
    whole.train()
    assert_same(before, parameters(whole.method.reference.model), 0)

    adapter = {"peft_config": LoraOptions(use_peft=True, lora_r=4)}
    made = trainer(pairs(4), tokenizer, extras=adapter, max_steps=2, save_strategy="steps", save_steps=2)
    assert isinstance(made.method.reference, AdapterOff)
    made.train()
    made.save_model("adapter")
    assert logged(made, "loss")[0] == pytest.approx(LN2, abs=1e-6)
    assert logged(made, "loss")[1] < LN2

    named = trainer(pairs(), tokenizer, str(model_folder), extras={"ref_model": str(model_folder)})
    assert isinstance(named.method.reference, FrozenModel)
    named.train()
    assert logged(named, "loss")[0] == pytest.approx(LN2, abs=1e-6)


def test_an_adapter_that_was_trained_is_continued(tokenizer, model_folder):
    pytest.importorskip("peft")
    adapter = {"peft_config": LoraOptions(use_peft=True, lora_r=4)}
    first = trainer(pairs(), tokenizer, str(model_folder), extras=adapter, max_steps=3)
    first.train()
    first.save_model("adapter")
    made = trainer(pairs(4), tokenizer, "adapter", max_steps=2)
    assert isinstance(made.method.reference, NamedAdapter)
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(LN2, abs=1e-6)
    assert logged(made, "loss")[1] < LN2


def test_precomputed_references_change_neither_rows_nor_the_random_state(tokenizer):
    other = tiny_model("llama", vocab_size=len(tokenizer), seed=1)
    options = {"train_sampling_strategy": "random", "max_steps": 3}
    live = trainer(pairs(), tokenizer, extras={"ref_model": other}, **options)
    drawn = torch.rand(1)
    live.train()
    rows = {"ref_model": other, "eval_dataset": pairs(3)}
    made = trainer(pairs(), tokenizer, extras=rows, precompute_ref_log_probs=True, **options)
    assert torch.equal(torch.rand(1), drawn)
    assert made.method.reference is None
    made.train()
    assert_same(parameters(live), parameters(made))
    assert logged(made, "loss") == pytest.approx(logged(live, "loss"), abs=2e-6)
    assert made.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="carry no log-probabilities"):
        made.evaluate(pairs(2))


def test_precomputing_without_a_second_model(tokenizer):
    made = trainer(pairs(), tokenizer, precompute_ref_log_probs=True, max_steps=2)
    assert made.method.reference is None and "chosen_reference_logps" in made.train_dataset[0]
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(LN2, abs=1e-6)


def test_the_reference_follows(tokenizer):
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    made = trainer(pairs(), tokenizer, max_steps=3, save_strategy="steps", save_steps=2, **options)
    start = parameters(made)
    made.train()
    reference = parameters(made.method.reference.model)
    with pytest.raises(AssertionError):
        assert_same(start, reference)
    # Step 3 begins where step 2 left policy and reference alike.
    assert logged(made, "loss")[2] == pytest.approx(LN2, abs=1e-6)

    again = trainer(pairs(), tokenizer, max_steps=3, **options)
    again.train(resume_from_checkpoint="out/checkpoint-2")
    assert_same(parameters(made), parameters(again), 0)
    assert_same(reference, parameters(again.method.reference.model), 0)


# ---- Around it ----


def test_resume_is_exact(tokenizer):
    whole = trainer(pairs(), tokenizer, max_steps=4, save_strategy="steps", save_steps=2, optim="adamw_torch")
    whole.train()
    again = trainer(pairs(), tokenizer, max_steps=4, optim="adamw_torch")
    again.train(resume_from_checkpoint="out/checkpoint-2")
    assert_same(parameters(whole), parameters(again), 0)


def test_rows_that_are_too_long_are_cut_or_dropped_and_counted(tokenizer, caplog):
    caplog.set_level("INFO", "posttrain")
    rows = [*pairs(3), {"prompt": "x " * 80, "chosen": "a", "rejected": "b"},
            {"prompt": "After:", "chosen": " " + "y " * 80, "rejected": " b"}]  # fmt: skip
    made = trainer(rows, tokenizer)
    assert len(made.train_dataset) == 4
    assert "5 rows, 4 kept, 1 dropped" in caplog.text and "1 rows cut" in caplog.text


def test_compute_metrics_gets_rewards(tokenizer):
    seen = []
    extras = {"eval_dataset": pairs(5), "compute_metrics": lambda found: seen.append(found) or {"mine": 1.0}}
    made = trainer(pairs(), tokenizer, extras=extras, per_device_eval_batch_size=2)
    made.train()
    assert made.evaluate()["eval_mine"] == 1.0
    assert seen[-1].predictions.shape == (5, 2) and seen[-1].label_ids.tolist() == [0] * 5


def test_a_stream_trains(tokenizer):
    datasets = pytest.importorskip("datasets")
    made = trainer(datasets.Dataset.from_list(pairs()).to_iterable_dataset(), tokenizer, max_steps=3)
    made.train()
    assert len(logged(made, "loss")) == 3


def test_in_bfloat16_the_reference_runs_in_it_too(tokenizer):
    made = trainer(pairs(), tokenizer, bf16=True)
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(LN2, abs=1e-6)


def test_a_mixture_of_experts_logs_its_balance(tokenizer):
    model = tiny_model("mixtral", vocab_size=len(tokenizer))
    made = trainer(pairs(4), tokenizer, model, router_aux_loss_coef=0.1)
    made.train()
    aux = logged(made, "aux_loss")[0]
    assert aux > 0 and logged(made, "loss")[0] == pytest.approx(LN2 + 0.1 * aux, abs=1e-5)


def test_the_method_alone():
    assert DPO().needs_reference and not DPO(losses=((simpo, 1.0),)).needs_reference
    assert config(loss_type=["ipo"]).losses()[0][0].func is ipo


def test_plain_training_arguments_will_do(tokenizer, tmp_path):
    from posttrain_trainer import TrainingConfig

    args = TrainingConfig(str(tmp_path / "x"), max_steps=1, report_to="none", use_cpu=True, learning_rate=0.5)
    made = DPOTrainer(
        tiny_model("llama", vocab_size=len(tokenizer)), args=args, train_dataset=pairs(2), processing_class=tokenizer
    )
    assert made.args.learning_rate == 0.5 and made.args.beta == 0.1


def test_on_a_device_with_static_shapes_every_forward_has_a_planned_shape(tokenizer, monkeypatch):
    check_static_shapes(trainer, pairs(7), tokenizer, monkeypatch)

"""DPO, KTO and reward models: what must not change a number changes none, and what is cut is counted."""

import gc
import math
import random

import numpy as np
import pytest
import torch
from app_command import save_model
from preference_runs import (
    APPS,
    COUPLED,
    JOBS,
    METHODS,
    PRECOMPUTED,
    STEP,
    TOGETHER,
    Gradients,
    Job,
    evaluations,
    on_two_processes,
    other_reference,
    outcome,
    run,
    trainer,
)
from transformers import set_seed

LAYOUTS = ("shared", "packed", "padded")


@pytest.fixture(autouse=True, scope="module")
def _fast():
    """Every train() collects garbage, which takes long over all that is imported by now."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _apart(monkeypatch, tmp_path):
    """Nothing is written or kept outside tmp_path, and nothing runs on an accelerator."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def assert_same(one, other, tolerance=5e-6):
    """Equal logs to rounding, and weights to the tolerance."""
    assert len(one.log) == len(other.log)
    for wanted, entry in zip(one.log, other.log, strict=True):
        assert entry == {name: pytest.approx(value, rel=1e-4, abs=2e-5) for name, value in wanted.items()}
    gaps = {name: float((other.weights[name] - value).abs().max()) for name, value in one.weights.items()}
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= tolerance, f"{worst} differs by {gaps[worst]}"


# ---- How the rows of a step are dealt ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job on one process, with one batch a step; asked once."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = run(name, tmp_path_factory.mktemp("whole"), STEP, 1)
            losses = [entry["loss"] for entry in known[name].log if "loss" in entry]
            assert len(set(losses)) == 3 and all(map(math.isfinite, losses))
        return known[name]

    return get


@pytest.mark.parametrize("name", JOBS)
def test_a_step_is_the_same_however_it_is_split(name, whole, tmp_path):
    """21 rows, 8 a step: the last step has 5 rows, in shares of 5, 3 and 2, or 2, 2 and 1."""
    for size, accumulation in ((4, 2), (2, 4)):
        assert_same(whole(name), run(name, tmp_path, size, accumulation))


@pytest.mark.parametrize("name", ["kto kto", "kto apo_zero_unpaired"])
@pytest.mark.parametrize(("size", "accumulation"), [(1, 8), (3, 3)])
def test_rows_one_by_one_and_odd_shares(size, accumulation, name, whole, tmp_path):
    if size * accumulation == STEP:
        one = whole(name)
    else:
        one = run(name, tmp_path, size * accumulation, 1)
    assert_same(one, run(name, tmp_path, size, accumulation))


@pytest.mark.parametrize("loss", COUPLED)
def test_losses_that_couple_rows_are_named_as_exempt(loss, tmp_path, monkeypatch):
    from posttrain_dpo import DPO
    from posttrain_dpo.config import LOSSES

    assert {name for job in JOBS.values() if job.app == "dpo" for name in job.options.get("loss_type", ())} == set(
        LOSSES
    ) - set(COUPLED)
    assert f"`{loss}`" in DPO.__doc__
    monkeypatch.setitem(JOBS, loss, Job("dpo", {"loss_type": [loss]}))
    one, other = (run(loss, tmp_path, size, STEP // size) for size in (8, 2))
    gaps = [abs(a["loss"] - b["loss"]) for a, b in zip(one.log, other.log, strict=True) if "loss" in a]
    assert len(gaps) == 3 and max(gaps) > 1e-3


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return on_two_processes(tmp_path_factory.mktemp("together"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_are_one(name, size, whole, together):
    assert_same(whole(name), together["steps"][name, size])


@pytest.mark.slow
@pytest.mark.parametrize("name", PRECOMPUTED)
def test_two_processes_compute_references_beforehand(name, whole, together):
    assert_same(whole(name), together["precomputed"][name])


@pytest.mark.slow
def test_two_processes_evaluate_as_one_to_the_last_bit(together, tmp_path):
    """In batches of two, 11 rows end with a batch of one, and 9 rows with one batch for two processes."""
    alone = evaluations(tmp_path)
    assert alone == together["evaluations"]
    assert all(math.isfinite(value) for found in alone.values() for value in found.values())
    assert len({found["eval_loss"] for found in alone.values()}) == len(alone)


# ---- Layouts ----


def in_layout(monkeypatch, layout):
    """Options that make a run take a layout; `packed` is what models run that cannot share a prompt."""
    if layout == "packed":
        monkeypatch.setattr("posttrain_models.layout._unshared", lambda base: "the test says so")
    return {"padding_free": False} if layout == "padded" else {}


@pytest.mark.parametrize("own", [True, False], ids=["own reference", "other reference"])
@pytest.mark.parametrize("app", APPS)
def test_layouts_agree_on_losses_and_gradients(app, own, tmp_path, monkeypatch):
    found = {}
    for layout in LAYOUTS:
        gradients = Gradients()
        extras = {"callbacks": [gradients], **({} if own else other_reference(app))}
        with monkeypatch.context() as patch:
            made = trainer(app, tmp_path, extras=extras, max_steps=2, **in_layout(patch, layout))
            assert made.shape_plan.layout == layout
            made.train()
        found[layout] = [entry["loss"] for entry in made.state.log_history if "loss" in entry], gradients.first
        if own and app != "reward":
            assert found[layout][0][0] == pytest.approx({"dpo": math.log(2), "kto": 0.5}[app], abs=1e-6)
    losses, wanted = found["padded"]
    assert len(losses) == 2 and len(set(losses)) == 2
    size = max(float(value.abs().max()) for value in wanted.values())
    assert size > 1e-3
    for layout in LAYOUTS:
        assert found[layout][0] == pytest.approx(losses, abs=2e-6), layout
        assert found[layout][1].keys() == wanted.keys()
        for name, value in found[layout][1].items():
            assert float((value - wanted[name]).abs().max()) < 1e-5 * max(size, 1), (layout, name)


# ---- References that are computed beforehand ----


def states():
    return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]


def ids_of(row):
    return [row[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids") if name in row]


@pytest.mark.parametrize("name", ["dpo sigmoid", "kto kto", "kto apo_zero_unpaired"])
def test_precomputing_changes_neither_rows_nor_chance_nor_losses(name, tmp_path):
    app, options, _ = JOBS[name]
    found = []
    for precomputed in (False, True):
        set_seed(1)
        made = trainer(
            app, tmp_path, extras=other_reference(app), precompute_ref_log_probs=precomputed, max_steps=4, **options
        )
        assert any(column.endswith("reference_logps") for column in made.train_dataset[0]) == precomputed
        kept, collate, order = [ids_of(row) for row in made.train_dataset], made.data_collator, []

        def noting(batch, *args, collate=collate, order=order, **kwargs):
            order.extend(map(ids_of, batch))
            return collate(batch, *args, **kwargs)

        made.data_collator, before = noting, states()
        made.train()
        found.append((kept, before, order, states(), outcome(made)))
    (*exact, one), (*others, other) = found
    assert exact == others
    kept, _, order, _ = exact
    assert order[:STEP] != kept[:STEP]  # rows are shuffled
    assert_same(one, other, 2e-6)


ROWS_SEEN = 16

# ---- Kernels and precisions ----


@pytest.mark.parametrize("app", METHODS)
def test_a_kernel_of_the_hub_trains_and_its_layout_is_said(app, tmp_path, monkeypatch, caplog):
    """The name goes the way of `attn_implementation`; what the hub would send is registered here."""
    from posttrain_models import attention
    from transformers import AttentionInterface, AttentionMaskInterface

    name, calls = f"stub/{app}-kernel", []

    def kernel(module, *args, **kwargs):
        calls.append(module.training)
        return attention.posttrain_attention(module, *args, **kwargs)

    def download(implementation, **kwargs):
        assert implementation == name
        AttentionInterface.register(name, kernel)
        AttentionMaskInterface.register(name, attention.posttrain_mask)

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", download)
    folder = str(save_model(tmp_path / "model", "llama"))
    caplog.set_level("INFO", "posttrain")
    made = trainer(app, tmp_path, policy=folder, model_init_kwargs={"attn_implementation": name})
    made.train()
    assert made.model.config._attn_implementation == name and any(calls)
    (said,) = [line for line in caplog.text.splitlines() if "shapes on cpu" in line]
    assert "packed layout" in said and f"{name} reads the boundaries" in said
    plain = trainer(app, tmp_path, policy=folder)
    plain.train()
    assert_same(outcome(plain), outcome(made))


@pytest.mark.parametrize("app", APPS)
def test_bfloat16_trains_with_the_head_in_float32(app, tmp_path, monkeypatch):
    from posttrain_losses import token_scores

    gaps, rewards = [], []

    def noting(hidden, weight, targets, **options):
        found = token_scores(hidden, weight, targets, **options)
        exact = (hidden.detach().double() @ weight.detach().double().T).log_softmax(-1)
        exact = exact.gather(1, targets[:, None])[:, 0] if options["temperature"] == 1 else None
        if exact is not None and len(targets):
            gaps.append((hidden.dtype, weight.dtype, float((found.logps.detach() - exact).abs().max())))
        return found

    plain = trainer(app, tmp_path)
    plain.train()
    made = trainer(app, tmp_path, bf16=True)
    if app == "reward":  # a head in bfloat16 would answer with numbers that bfloat16 can hold
        made.model.score.register_forward_hook(lambda _, __, answer: rewards.append(answer[0].detach()))
    monkeypatch.setattr("posttrain_models.head.token_scores", noting)
    made.train()
    losses, wanted = ([entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (made, plain))
    assert losses == pytest.approx(wanted, abs=0.03) and losses != wanted and len(set(losses)) == 3
    assert all(value.dtype == torch.float32 for value in made.model.parameters())
    if app == "reward":
        assert len(rewards) == 3 and all(bool((found != found.bfloat16()).any()) for found in rewards)
        return
    assert losses[0] == pytest.approx({"dpo": math.log(2), "kto": 0.5}[app], abs=1e-6)
    assert {weight for _, weight, _ in gaps} == {torch.float32} and max(gap for *_, gap in gaps) < 1e-4


@pytest.mark.parametrize("app", METHODS)
def test_float16_is_refused_on_the_cpu(app, tmp_path):
    with pytest.raises(ValueError, match="fp16=True, but mixed precision in float16 is not to be had on cpu"):
        trainer(app, tmp_path, fp16=True)


# ---- Rows that are too long ----

LONG = " ".join(["stone"] * 90)
KEEP_START, KEEP_END = {"truncation_mode": "keep_start"}, {"truncation_mode": "keep_end"}


@pytest.mark.parametrize(
    ("app", "options", "side", "reason"),
    [
        ("dpo", KEEP_START, "prompt", "a prompt that fills max_length"),
        ("kto", KEEP_START, "prompt", "a prompt that fills max_length"),
        ("dpo", KEEP_END, "rejected", "a completion that fills max_length"),
        ("kto", KEEP_END, "completion", "a completion that fills max_length"),
        ("reward", {}, "rejected", "a side longer than max_length"),
    ],
)
def test_a_row_of_which_nothing_would_be_left_is_dropped_and_counted(app, options, side, reason, tmp_path, caplog):
    caplog.set_level("INFO", "posttrain")
    rows = APPS[app].rows(4)
    made = trainer(app, tmp_path, rows=[*rows, {**rows[0], side: LONG}], max_steps=1, **options)
    assert len(made.train_dataset) == 4
    assert "5 rows, 4 kept, 1 dropped" in caplog.text and reason in caplog.text
    made.train()
    same = trainer(app, tmp_path, rows=rows, max_steps=1, **options)
    same.train()
    assert_same(outcome(same), outcome(made), 0)


@pytest.mark.parametrize(("app", "side"), [("dpo", "chosen"), ("kto", "completion")])
def test_a_completion_is_cut_to_its_last_token_but_not_to_none(app, side, tmp_path, caplog):
    """A prompt of one token less than `max_length` leaves each completion a token; one of `max_length` leaves none."""
    caplog.set_level("INFO", "posttrain")
    (row,) = trainer(app, tmp_path, rows=APPS[app].rows(1)).train_dataset
    length = len(row["prompt_ids"])
    made = trainer(app, tmp_path, rows=APPS[app].rows(1), max_length=length + 1, max_steps=1)
    (cut,) = made.train_dataset
    assert all(len(cut[name]) == 1 for name in cut if name.endswith("_ids") and name != "prompt_ids")
    assert "1 rows cut" in caplog.text
    made.train()
    with pytest.raises(ValueError, match="a prompt that fills max_length"):
        trainer(app, tmp_path, rows=APPS[app].rows(1), max_length=length)

"""References: what the policy was, whatever the policy has become, and the policy left as it is."""

import copy

import pytest
import torch
from posttrain_collators import PreferenceCollator
from posttrain_models import LoraOptions, apply_lora, choose_layout, completion_logps, load_model, tiny_model
from posttrain_models.references import AdapterOff, FrozenModel, NamedAdapter, make_reference
from posttrain_models.unwrap import state_of

ROWS = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9, 3], "rejected_ids": [10]},
    {"prompt_ids": [11], "chosen_ids": [12, 3], "rejected_ids": [1, 13, 14, 2, 3]},
]
BATCH = PreferenceCollator(0)(ROWS)


class Wrapped(torch.nn.Module):
    """As DDP holds a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **kwargs):
        return self.module(**kwargs)


def policy(kind):
    torch.manual_seed(0)
    if kind == "full":
        return tiny_model("llama", attention_dropout=0.5).train()
    options = {"lora_r": 4, "lora_dropout": 0.5}
    if kind == "head":
        options["lora_modules_to_save"] = ["lm_head"]
    if kind == "tied":
        options["lora_modules_to_save"] = ["embed_tokens", "lm_head"]
    if kind == "dora":
        options["use_dora"] = True
    if kind == "experts":
        options.update(lora_target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], lora_dropout=0.0)
    architecture = {"tied": "smollm2", "experts": "mixtral"}.get(kind, "llama")
    return apply_lora(tiny_model(architecture), LoraOptions(**options)).train()


def move(model, size=0.3):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def logps(model):
    modes = {m: m.training for m in model.modules()}
    model.eval()
    with torch.no_grad():
        result = completion_logps(model, BATCH)
    for module, mode in modes.items():
        module.training = mode
    return result


def status(model):
    return (
        [(n, p.requires_grad) for n, p in model.named_parameters()],
        [module.training for module in model.modules()],
        [(m._disable_adapters, m._active_adapter) for m in model.modules() if hasattr(m, "_disable_adapters")],
    )


KINDS = ["full", "lora", "head", "tied", "dora", "experts"]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_the_policy_was(kind, trained):
    model = policy(kind)
    if trained:
        move(model)
    state = torch.get_rng_state()
    reference = make_reference(model)
    assert torch.equal(torch.get_rng_state(), state)
    kinds = (FrozenModel,) if kind == "full" else (NamedAdapter,) if trained else (AdapterOff,)
    assert isinstance(reference, kinds)
    for layout in ("padded", "shared"):
        choose_layout(model, layout)
        before = logps(model)
        known = status(model)
        first = reference.logps(model, BATCH)
        assert status(model) == known
        assert not first.requires_grad and first.shape == (2, 2, 5)
        tolerance = 1e-5 if kind == "dora" else 1e-6
        torch.testing.assert_close(first, before, rtol=0, atol=tolerance)
    move(model)
    torch.testing.assert_close(reference.logps(model, BATCH), first, rtol=0, atol=0)
    assert (logps(model) - first).abs().max() > 0.01
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_gradients_of_the_policy_do_not_notice(kind):
    grads = []
    for compare in (False, True):
        model = policy(kind)
        if kind == "lora":
            move(model)
        model.eval()
        reference = make_reference(model) if compare else None
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if reference is not None:
                reference.logps(model, BATCH)
            completion_logps(model, BATCH).sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and grads[0]
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=0, atol=0)


def test_a_continued_adapter_is_copied(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    first = apply_lora(load_model(tmp_path / "base", device=None), LoraOptions(lora_r=4))
    move(first)
    first.save_pretrained(tmp_path / "adapter")
    model = load_model(tmp_path / "adapter", device=None)
    before = logps(model)
    reference = make_reference(model)
    assert isinstance(reference, NamedAdapter) and model.active_adapters == ["default"]
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("default" in n for n in trained)
    move(model)
    torch.testing.assert_close(reference.logps(model, BATCH), before, rtol=0, atol=1e-6)
    again = make_reference(model)  # of the adapter that is there, not of what the policy has become
    torch.testing.assert_close(again.logps(model, BATCH), before, rtol=0, atol=1e-6)


def test_initialisations_that_change_the_base_and_trained_biases():
    from peft import LoraConfig

    torch.manual_seed(0)
    model = apply_lora(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    before = logps(model)
    reference = make_reference(model)
    torch.testing.assert_close(logps(model), before, rtol=0, atol=0)
    torch.testing.assert_close(reference.logps(model, BATCH), before, rtol=0, atol=1e-6)
    assert isinstance(reference, NamedAdapter)
    biased = apply_lora(tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj"], bias="all"))
    reference = make_reference(biased)
    before = logps(biased)
    move(biased)
    assert isinstance(reference, FrozenModel)
    torch.testing.assert_close(reference.logps(biased, BATCH), before, rtol=0, atol=1e-6)


def test_what_the_batch_brings_along_is_used():
    rows = [
        {**row, "chosen_reference_logps": [-1.0] * len(row["chosen_ids"]),
         "rejected_reference_logps": [-2.0] * len(row["rejected_ids"])} for row in ROWS
    ]  # fmt: skip
    model = policy("full")
    reference = make_reference(model)
    given = reference.logps(model, PreferenceCollator(0)(rows))
    assert given[0].tolist() == [[-1.0, -1.0, -1.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.0, 0.0]]
    assert (reference.compute(model, PreferenceCollator(0)(rows)) != given).any()


def test_an_explicit_reference_follows_the_layout():
    model, other = policy("full"), tiny_model("llama", seed=1).train()
    reference = make_reference(model, other)
    assert not any(p.requires_grad for p in other.parameters()) and not other.training
    for layout in ("padded", "packed", "shared"):
        choose_layout(model, layout)
        got = reference.logps(model, BATCH)
        assert state_of(other).layout.name == layout
        torch.testing.assert_close(got, logps(other), rtol=0, atol=0)
    odd = make_reference(model, tiny_model("qwen3_5"))
    assert odd.logps(model, BATCH).shape == (2, 2, 5)


def test_references_that_are_the_policy_are_refused():
    model = policy("full")
    with pytest.raises(ValueError, match="ref_model is the model that is trained: leave it out"):
        make_reference(model, model)
    with pytest.raises(ValueError, match="ref_model is the model that is trained"):
        make_reference(Wrapped(model), model)
    shared = copy.deepcopy(model)
    shared.lm_head = model.lm_head
    with pytest.raises(ValueError, match="ref_model shares weights"):
        make_reference(model, shared)


def test_sync():
    model = policy("full")
    reference = make_reference(model)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    move(model)
    reference.sync(model, 0.25)
    reference.sync(Wrapped(model), 0.5)
    for name, weight in reference.model.named_parameters():
        want = 0.375 * start[name].double() + 0.625 * dict(model.named_parameters())[name].double()
        torch.testing.assert_close(weight.double(), want, rtol=0, atol=1e-6)
        assert not weight.requires_grad
    saved = {n: t.clone() for n, t in reference.state_dict().items()}
    before = reference.logps(model, BATCH)
    reference.sync(model, 1.0)
    torch.testing.assert_close(reference.logps(model, BATCH), logps(model), rtol=0, atol=0)
    reference.load_state_dict(saved)
    torch.testing.assert_close(reference.logps(model, BATCH), before, rtol=0, atol=0)
    half = tiny_model("llama").bfloat16()
    mixed = FrozenModel(half)
    mixed.sync(model, 0.5)
    assert next(half.parameters()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="alpha=1.5 is not between 0 and 1"):
        reference.sync(model, 1.5)
    with pytest.raises(ValueError, match="the policy has an adapter"):
        reference.sync(policy("lora"), 0.5)
    with pytest.raises(ValueError, match="different architectures"):
        FrozenModel(tiny_model("llama", num_hidden_layers=1)).sync(model, 0.5)

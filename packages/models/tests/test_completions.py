"""Completions scored in three layouts, against an independent float64 reference."""

import copy
from dataclasses import replace

import pytest
import torch
from posttrain_collators import CompletionBatch, Padding, TokenCollator
from posttrain_models import (
    LoraOptions,
    apply_lora,
    attention,
    choose_layout,
    completion_logps,
    score_completions,
    score_tokens,
    tiny_model,
    weighted_logp_sum,
)
from posttrain_models.inputs import build_completion_plan
from posttrain_models.unwrap import state_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForSequenceClassification

SHARING = (
    "llama",
    "smollm2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "cohere",
    "granite",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)
LAYOUTS = (("padded", False), ("packed", False), ("shared", False), ("padded", True), ("shared", True))
# Prompt and completion lengths of every row: longer than the windows, ragged, one token, none; the last is a filler.
ROWS = ((17, (5, 23)), (1, (1, 9)), (9, (0, 4)), (0, (6, 3)), (3, (12, 1)), (1, (0, 0)))


def batch_of(rows=ROWS, vocab=128, seed=0, prompt_width=None, completion_width=None):
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.tensor([prompt for prompt, _ in rows])
    lengths = torch.tensor([list(completions) for _, completions in rows])
    Tp = prompt_width or int(prompt_lengths.max())
    Tc = completion_width or max(1, int(lengths.max()))
    prompt_mask = torch.arange(Tp) >= Tp - prompt_lengths[:, None]
    mask = torch.arange(Tc) < lengths[..., None]
    prompts = torch.randint(1, vocab, prompt_mask.shape, generator=generator) * prompt_mask
    completions = torch.randint(1, vocab, mask.shape, generator=generator) * mask
    return CompletionBatch(prompts, prompt_mask, completions, mask)


def exact_copy(model):
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    return exact


def reference(exact, batch, temperature=1.0):
    """Log-probabilities, entropies, top-1, mean logits and collision entropies, in float64, a sequence at a time."""
    parts = [torch.zeros(batch.completions.shape, dtype=torch.float64) for _ in range(5)]
    for p, g in [(p, g) for p in range(len(batch.prompts)) for g in range(batch.completions.shape[1])]:
        prompt = batch.prompts[p, batch.prompt_mask[p]]
        completion = batch.completions[p, g, batch.completion_mask[p, g]]
        first = max(1, len(prompt))
        ids = torch.cat([prompt, completion])
        if len(ids) <= first:
            continue
        raw = exact(input_ids=ids[None]).logits[0, first - 1 : -1].double()
        logps = (raw / temperature).log_softmax(-1)
        steps = torch.arange(first - len(prompt), len(completion))
        where = torch.full_like(steps, p), torch.full_like(steps, g), steps
        targets = ids[first:]
        found = (
            logps.gather(1, targets[:, None])[:, 0],
            -(logps.exp() * logps).sum(-1),
            (raw.argmax(-1) == targets).double(),
            raw.mean(-1),
            -logps.exp().square().sum(-1).log(),
        )
        parts = [part.index_put(where, value) for part, value in zip(parts, found, strict=True)]
    return parts


def weights_of(batch, seed=1):
    return torch.randn(batch.completions.shape, generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(got, want, tolerance):
    """Relative, over all parameters together, and of every parameter within a multiple of that."""
    assert got.keys() == want.keys()
    whole = torch.cat([g.flatten() for g in want.values()]).norm()
    gap = torch.cat([(got[name] - want[name]).flatten() for name in want]).norm()
    assert gap <= tolerance * whole
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= 20 * tolerance * max(float(grad.norm()), 1e-3 * float(whole)), name


def backward(model, batch, **options):
    model.zero_grad()
    scores = score_completions(model, batch, **options)
    (scores.logps.square() * weights_of(batch)).sum().backward()
    return scores, gradients(model)


def layouts_of(model, layouts=LAYOUTS):
    for name, static in layouts:
        assert choose_layout(model, name, static_shapes=static).name == name
        yield name, static


@pytest.mark.parametrize("architecture", SHARING)
def test_layouts_equal_the_float64_reference_and_each_other(architecture):
    model, batch = tiny_model(architecture), batch_of()
    exact = exact_copy(model)
    logps, entropy, top1, mean, collision = reference(exact, batch)
    w = weights_of(batch)
    ((logps.square() + 0.3 * entropy) * w).sum().backward()
    want, first = gradients(exact), None
    for _ in layouts_of(model):
        model.zero_grad()
        scores = score_completions(model, batch, entropy=True, mean_logit=True, collision=True)
        assert state_of(model).head.fused
        torch.testing.assert_close(scores.logps.double(), logps.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.entropy.double(), entropy.detach(), rtol=0, atol=1e-5)
        assert torch.equal(scores.top1, top1.bool())
        torch.testing.assert_close(scores.collision.double(), collision.detach(), rtol=0, atol=1e-5)
        assert not scores.collision.requires_grad
        if architecture == "gemma2":
            assert scores.mean_logit is None
        else:
            torch.testing.assert_close(scores.mean_logit.double(), mean.detach(), rtol=0, atol=1e-5)
            assert not scores.mean_logit.requires_grad
        ((scores.logps.square() + 0.3 * scores.entropy) * w).sum().backward()
        got = gradients(model)
        assert_gradients(got, want, 2e-6)
        first = first or (scores.logps.detach(), got)
        torch.testing.assert_close(scores.logps, first[0], rtol=0, atol=2e-6)
        assert_gradients(got, first[1], 7e-7)


def test_a_hybrid_model_runs_padded():
    model, batch = tiny_model("qwen3_5"), batch_of()
    for static in (False, True):
        assert choose_layout(model, static_shapes=static, completions=True).name == "padded"
        exact = exact_copy(model)
        logps = reference(exact, batch)[0]
        scores, got = backward(model, batch)
        torch.testing.assert_close(scores.logps.double(), logps.detach(), rtol=0, atol=1e-5)
        (logps.square() * weights_of(batch)).sum().backward()
        assert_gradients(got, gradients(exact), 5e-6)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("G", [1, 2, 8])
def test_any_number_of_completions(architecture, G):
    rows = [(prompt, [(7 * i + prompt) % 11 for i in range(G)]) for prompt in (12, 2, 0, 30)]
    model, batch = tiny_model(architecture), batch_of(rows, prompt_width=32, completion_width=16)
    want = reference(exact_copy(model), batch, temperature=0.7)[0]
    first = None
    for _ in layouts_of(model):
        scores, got = backward(model, batch, temperature=0.7)
        torch.testing.assert_close(scores.logps.double(), want, rtol=0, atol=1e-5)
        first = first or got
        assert_gradients(got, first, 1e-6)


def test_shared_computes_every_prompt_once():
    model, batch = tiny_model("llama"), batch_of()
    prompts, completions = int(batch.prompt_mask.sum()), int(batch.completion_mask.sum())
    sizes = {
        name: build_completion_plan(model, batch, name, False).positions for name in ("padded", "packed", "shared")
    }
    assert sizes["shared"] == prompts + completions
    assert sizes["packed"] == 2 * prompts + completions
    assert sizes["padded"] == batch.completion_mask[..., 0].numel() * (17 + 23)
    assert build_completion_plan(model, batch, "shared", True).positions == 6 * (17 + 2 * 23)


def test_shared_computes_equal_prompts_of_several_rows_once():
    batch = batch_of(((12, (5, 3)), (2, (4, 0)), (12, (1, 7)), (0, (3, 2)), (12, (6, 6)), (2, (9, 1)), (11, (2, 2))))
    prompts, mask = batch.prompts.clone(), batch.prompt_mask
    prompts[2] = prompts[4] = prompts[0]
    prompts[5] = prompts[1]
    prompts[6, -11:] = prompts[0, -11:]  # a part of a prompt is another prompt
    # What stands in padding is of no account.
    prompts[4, ~mask[4]] = 7
    batch = batch._replace(prompts=prompts)
    for architecture in ("llama", "gemma3", "gpt_oss"):
        model = tiny_model(architecture)
        plan = build_completion_plan(model, batch, "shared", False)
        assert plan.positions == 12 + 2 + 11 + int(batch.completion_mask.sum())
        want = reference(exact_copy(model), batch)[0]
        first = None
        for _ in layouts_of(model):
            scores, got = backward(model, batch)
            torch.testing.assert_close(scores.logps.double(), want, rtol=0, atol=1e-5)
            first = first or got
            assert_gradients(got, first, 1e-6)


def test_the_head_sees_the_completions_alone():
    model, batch = tiny_model("llama"), batch_of()
    for name in ("padded", "packed", "shared"):
        plan = build_completion_plan(model, batch, name, False)
        assert len(plan.targets) == int(plan.valid.sum()) == int(batch.completion_mask.sum()) - 2
        assert torch.equal(plan.targets, batch.completions[plan.valid])


@pytest.mark.parametrize(("layout", "static"), LAYOUTS)
def test_last_is_the_last_token_by_length(layout, static):
    model = tiny_model("llama")
    batch = batch_of(((5, (3, 0, 6)), (2, (1, 6, 0)), (0, (2, 1, 4))))
    plan = build_completion_plan(model, batch, layout, static)
    ids, at = (plan.kwargs[name].reshape(-1)[plan.last] for name in ("input_ids", "position_ids"))
    for row, (p, g) in enumerate((p, g) for p in range(3) for g in range(3)):
        sequence = torch.cat(
            [batch.prompts[p, batch.prompt_mask[p]], batch.completions[p, g, batch.completion_mask[p, g]]]
        )
        assert (int(ids[row]), int(at[row])) == (int(sequence[-1]), len(sequence) - 1)


def test_without_a_prompt_the_first_token_is_not_scored():
    model = tiny_model("llama")
    batch = batch_of(((0, (4, 1)), (0, (2, 3))))
    assert batch.prompts.shape == (2, 0)
    want = reference(exact_copy(model), batch)[0]
    for _ in layouts_of(model):
        scores = score_completions(model, batch, entropy=True, mean_logit=True, collision=True)
        torch.testing.assert_close(scores.logps.double(), want, rtol=0, atol=1e-5)
        for part in scores[:4]:
            assert not part[:, :, 0].any()
        assert (scores.logps[:, :, 1:] < 0).sum() == 6


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_batch_of_fillers_gives_zero_gradients_everywhere(architecture):
    model, batch = tiny_model(architecture), batch_of(((1, (0, 0)), (1, (0, 0))), completion_width=3)
    for _ in layouts_of(model):
        scores, got = backward(model, batch, entropy=True)
        assert not scores.logps.any() and not scores.entropy.any() and not scores.top1.any()
        assert len(got) == len(list(model.parameters())) and not any(grad.any() for grad in got.values())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_gradient_checkpointing(architecture, reentrant):
    batch = batch_of()
    plain, saving = tiny_model(architecture).train(), tiny_model(architecture).train()
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    saving.enable_input_require_grads()
    for layout, static in LAYOUTS:
        results = []
        for model in (saving, plain):
            choose_layout(model, layout, static_shapes=static)
            results.append(backward(model, batch)[1])
        assert_gradients(*results, 1e-7)


def test_an_adapter():
    batch = batch_of()
    model = apply_lora(tiny_model("llama"), LoraOptions(lora_r=4, lora_dropout=0.0, lora_target_modules=["all-linear"]))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    first = None
    for _ in layouts_of(model):
        scores, got = backward(model, batch)
        first = first or (scores.logps.detach(), got)
        torch.testing.assert_close(scores.logps, first[0], rtol=0, atol=2e-6)
        assert_gradients(got, first[1], 2e-6)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_autocast(architecture, layout):
    model, batch = tiny_model(architecture), batch_of()
    choose_layout(model, "padded")
    want, exact = backward(model, batch)
    choose_layout(model, layout)
    with torch.autocast("cpu", torch.bfloat16):
        scores, got = backward(model, batch)
    assert scores.logps.dtype == torch.float32
    torch.testing.assert_close(scores.logps, want.logps, rtol=0, atol=0.15)
    assert_gradients(got, exact, 0.05)


def test_dropout_of_attention_draws_anew_for_every_completion():
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0)
    batch = batch_of(((12, (6,) * 4),))
    batch = batch._replace(completions=batch.completions[:, :1].expand(1, 4, 6).contiguous())
    choose_layout(model, "shared")
    assert torch.allclose(*completion_logps(model, batch)[0, :2])
    assert not torch.allclose(*completion_logps(model.train(), batch)[0, :2])


def test_token_batches_run_packed_where_prompts_are_shared():
    tokens = TokenCollator(Padding(0))([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 3]}])
    model = tiny_model("gemma3")
    choose_layout(model, "padded")
    want = score_tokens(model, tokens).logps
    for static in (False, True):
        choose_layout(model, "shared", static_shapes=static)
        torch.testing.assert_close(score_tokens(model, tokens).logps, want, rtol=0, atol=2e-6)
        assert weighted_logp_sum(model, tokens, torch.ones(2, 4)).scores.logps.shape == (2, 4)


def test_a_head_that_is_not_linear_uses_full_logits():
    class Odd(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) + hidden.mean(-1, keepdim=True)

    model, batch = tiny_model("llama"), batch_of()
    model.lm_head.__class__ = Odd
    exact = exact_copy(model)
    logps, entropy, _, mean, collision = reference(exact, batch, temperature=0.7)
    for _ in layouts_of(model):
        scores = score_completions(model, batch, temperature=0.7, entropy=True, mean_logit=True, collision=True)
        assert not state_of(model).head.fused
        for got, want in (
            (scores.logps, logps),
            (scores.entropy, entropy),
            (scores.mean_logit, mean),
            (scores.collision, collision),
        ):
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [ROWS, ((0, (4, 1)), (0, (2, 3)))])
@pytest.mark.parametrize(
    ("architecture", "layout"), [("llama", "padded"), ("llama", "shared"), ("gemma2", "shared"), ("qwen3_5", "padded")]
)
def test_nothing_depends_on_the_data_where_shapes_are_static(architecture, layout, rows):
    model, batch = tiny_model(architecture), batch_of(rows)
    choose_layout(model, layout, static_shapes=True)
    completion_logps(model, batch)
    known = state_of(model)
    with FakeTensorMode() as mode:
        fake = tiny_model(architecture)
        state = state_of(fake)
        state.layout = known.layout
        state.head = replace(known.head, modules=(id(fake.lm_head),))
        fakes = CompletionBatch(*(mode.from_tensor(x) for x in batch[:4]))
        scores = score_completions(fake, fakes, entropy=True, mean_logit=True, collision=True)
        (scores.logps.sum() + scores.entropy.sum()).backward()
        plan = build_completion_plan(fake, fakes, layout, True)
    assert scores.logps.shape == batch.completions.shape and plan.last.shape == (len(rows) * 2,)


@pytest.mark.slow
def test_torch_compile_on_static_shapes_is_one_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model("gemma2", num_hidden_layers=1, layer_types=["sliding_attention"]).train()
    choose_layout(model, "shared", static_shapes=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for seed in range(2):
        batch = batch_of(ROWS[seed : seed + 3], seed=seed, prompt_width=17, completion_width=23)
        torch.testing.assert_close(completion_logps(compiled, batch), completion_logps(model, batch))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_batches_that_are_not_what_they_must_be_are_refused():
    model, batch = tiny_model("llama"), batch_of()
    completion_logps(model, batch)
    wrong = (
        ({"completions": batch.completions[:, 0]}, r"non-empty \(P, G, Tc\)"),
        ({"completions": batch.completions[..., :0], "completion_mask": batch.completion_mask[..., :0]}, "non-empty"),
        ({"prompts": batch.prompts[1:]}, "P=6"),
        ({"prompt_mask": batch.prompt_mask.long()}, "prompt_mask must be a bool tensor"),
        ({"completion_mask": batch.completion_mask[:, :1]}, "completion_mask must be a bool tensor"),
        ({"prompt_mask": batch.prompt_mask.flip(1)}, "prompts must be padded on the left"),
        ({"completion_mask": batch.completion_mask.flip(2)}, "completions must be padded on the right"),
    )
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            completion_logps(model, batch._replace(**changes))
    nothing = batch_of(((0, (0, 0)),), prompt_width=2)
    with pytest.raises(ValueError, match="no token"):
        completion_logps(model, nothing)


def test_sharing_is_chosen_for_completions_alone():
    model = tiny_model("llama")
    assert choose_layout(model).name == "packed"
    assert choose_layout(model, completions=True) == ("shared", "SDPA within each sequence and its prompt", False)
    assert choose_layout(model, static_shapes=True).name == "padded"
    layout = choose_layout(model, static_shapes=True, completions=True)
    assert layout.name == "shared" and layout.static_shapes
    fresh = tiny_model("llama")
    completion_logps(fresh, batch_of())
    assert state_of(fresh).layout.name == "shared"


def test_a_model_that_does_not_carry_the_bounds_of_keys_runs_packed():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "cu_seq_lens_k"}),
            with_kwargs=True,
        )
    layout = choose_layout(model, completions=True)
    assert layout.name == "packed" and "did not receive which keys its completions see" in layout.reason
    with pytest.raises(ValueError, match="'shared' is not possible.*use 'auto' or 'packed'"):
        choose_layout(model, "shared")
    want = reference(exact_copy(tiny_model("llama")), batch_of())[0]
    choose_layout(model, completions=True)
    torch.testing.assert_close(completion_logps(model, batch_of()).double(), want, rtol=0, atol=1e-5)


def test_the_balance_loss_rules_sharing_out():
    model = tiny_model("mixtral", output_router_logits=True)
    assert "router's balance loss" in choose_layout(model, completions=True).reason
    assert score_completions(model, batch_of()).aux_loss is not None


def test_a_kernel_of_the_hub_runs_packed():
    from transformers import AttentionInterface, AttentionMaskInterface

    name = "stub/shared-kernel"
    AttentionInterface.register(name, attention.posttrain_attention)
    AttentionMaskInterface.register(name, attention.posttrain_mask)
    model = tiny_model("llama")
    model.config._attn_implementation_internal = name
    layout = choose_layout(model, completions=True)
    assert layout.name == "packed" and f"{name} does not read which prompt" in layout.reason
    torch.testing.assert_close(
        completion_logps(model, batch_of()), completion_logps(tiny_model("llama"), batch_of()), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("static", [False, True])
def test_a_sequence_classifier_has_a_layout_too(static):
    config = copy.deepcopy(tiny_model("gemma3").config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    assert choose_layout(model, static_shapes=static, completions=True).name == "shared"
    assert choose_layout(model, static_shapes=static).name == ("padded" if static else "packed")

"""The scorer against an independent float64 reference, in every layout."""

import copy
from dataclasses import replace

import pytest
import torch
from posttrain_collators import Padding, TokenBatch, TokenCollator
from posttrain_models import choose_layout, score_tokens, tiny_model, weighted_logp_sum
from posttrain_models.unwrap import state_of
from torch._subclasses.fake_tensor import FakeTensorMode

ARCHITECTURES = (
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
LENGTHS = (5, 23, 1, 17)


def rows(lengths=LENGTHS, seed=0, vocab=128):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(1, vocab, (length,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) > 0.3).tolist()
        made.append({"input_ids": ids, "loss_mask": mask})
    return made


def batch_of(given, side="right", size=None):
    return TokenCollator(Padding(0, side=side))(given, size)


def packed_row(given):
    ids = [token for row in given for token in row["input_ids"]]
    mask = [flag for row in given for flag in row["loss_mask"]]
    return {"input_ids": ids, "loss_mask": mask, "seq_lengths": [len(row["input_ids"]) for row in given]}


def reference(model, given, temperature=1.0):
    """Per row: log-probabilities, entropies and top-1 in float64, one unpadded sequence at a time, eager attention."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    results = []
    for row in given:
        ids = torch.tensor([row["input_ids"]])
        logits = exact(input_ids=ids).logits[0, :-1].double() / temperature
        logps = logits.log_softmax(-1)
        mask = torch.tensor(row["loss_mask"][1:], dtype=torch.bool)
        picked = logps.gather(1, ids[0, 1:, None])[:, 0]
        results.append((picked, -(logps.exp() * logps).sum(-1), logits.argmax(-1) == ids[0, 1:], mask))
    return exact, results


def gradients(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(got, want, tolerance=2e-5):
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert (got[name] - grad).abs().max() <= tolerance * max(float(grad.abs().max()), 1e-3), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layouts_equal_the_float64_reference(architecture):
    given = rows()
    batch = batch_of(given)
    weights = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    model = tiny_model(architecture)
    exact, expected = reference(model, given)
    total = sum((logps * mask * weights[i, 1 : len(mask) + 1]).sum() for i, (logps, _, _, mask) in enumerate(expected))
    total.backward()
    want = gradients(exact)
    for layout, static in (("padded", False), ("padded", True), ("packed", False)):
        choose_layout(model, layout, static_shapes=static)
        scores = score_tokens(model, batch, entropy=True)
        for i, (logps, entropy, top1, mask) in enumerate(expected):
            here = slice(1, len(mask) + 1)
            torch.testing.assert_close(scores.logps[i, here].double(), logps * mask, rtol=0, atol=2e-5)
            torch.testing.assert_close(scores.entropy[i, here].double(), entropy * mask, rtol=0, atol=2e-5)
            assert torch.equal(scores.top1[i, here], top1 & mask)
        assert scores.logps[~batch.loss_mask].abs().sum() == 0
        model.zero_grad()
        result = weighted_logp_sum(model, batch, weights)
        torch.testing.assert_close(result.total.double(), total.detach(), rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(result.scores.logps, scores.logps.detach(), rtol=0, atol=2e-5)
        assert not result.scores.logps.requires_grad
        result.total.backward()
        assert_gradients(gradients(model), want)
        assert state_of(model).head.fused


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("layout", ["padded", "packed", "static"])
def test_packed_rows_equal_separate_documents(architecture, layout):
    given = rows((30, 4, 19, 1, 12))
    apart = batch_of(given)
    together = batch_of([packed_row(given[:3]), packed_row(given[3:])])
    model = tiny_model(architecture)
    choose_layout(model, "padded")
    want = score_tokens(model, apart).logps
    choose_layout(model, "padded" if layout == "static" else layout, static_shapes=layout == "static")
    got = score_tokens(model, together).logps
    torch.testing.assert_close(got[together.loss_mask], want[apart.loss_mask], rtol=0, atol=2e-5)


def test_a_hybrid_model_splits_packed_rows():
    given = rows((30, 4, 19))
    model = tiny_model("qwen3_5")
    assert choose_layout(model).name == "padded"
    want = score_tokens(model, batch_of(given)).logps
    together = batch_of([packed_row(given)])
    got = score_tokens(model, together).logps
    torch.testing.assert_close(got[together.loss_mask], want[batch_of(given).loss_mask], rtol=0, atol=2e-5)
    _, expected = reference(model, given)
    for i, (logps, _, _, mask) in enumerate(expected):
        torch.testing.assert_close(want[i, 1 : len(mask) + 1].double(), logps * mask, rtol=0, atol=5e-5)


def test_a_hybrid_model_refuses_packed_rows_on_static_shapes():
    model = tiny_model("qwen3_5")
    choose_layout(model, static_shapes=True)
    want = score_tokens(model, batch_of(rows())).logps
    assert want.abs().sum() > 0
    with pytest.raises(ValueError, match=r"linear_attention.*packing=False"):
        score_tokens(model, batch_of([packed_row(rows())]))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_side_of_padding_and_filler_rows_change_nothing(layout):
    given = rows()
    model = tiny_model("qwen3")
    choose_layout(model, layout)
    right, left = batch_of(given), batch_of(given, side="left")
    want = score_tokens(model, right).logps[right.loss_mask]
    torch.testing.assert_close(score_tokens(model, left).logps[left.loss_mask], want, rtol=0, atol=2e-5)
    filled = batch_of(given, size=6)
    torch.testing.assert_close(score_tokens(model, filled).logps[filled.loss_mask], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_batch_without_targets_gives_zero_gradients_everywhere(architecture, static):
    model = tiny_model(architecture)
    choose_layout(model, static_shapes=static)
    batch = batch_of([], size=2)
    result = weighted_logp_sum(model, batch, torch.ones(batch.input_ids.shape))
    assert result.total == 0
    result.total.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad()
    scores = score_tokens(model, batch, entropy=True)
    assert not scores.logps.any() and not scores.entropy.any() and not scores.top1.any()
    (scores.logps.sum() + scores.entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_first_token_of_a_sequence_is_never_scored():
    batch = batch_of([packed_row(rows((6, 7)))])
    everywhere = batch._replace(loss_mask=torch.ones_like(batch.loss_mask))
    model = tiny_model("llama")
    for layout in ("padded", "packed"):
        choose_layout(model, layout)
        logps = score_tokens(model, everywhere).logps
        assert logps[0, 0] == 0 and logps[0, 6] == 0 and (logps[0, 1:6] < 0).all() and (logps[0, 7:] < 0).all()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_temperature_and_reweighting(layout):
    given = rows()
    model = tiny_model("gemma2")
    choose_layout(model, layout)
    batch = batch_of(given)
    exact, expected = reference(model, given, temperature=0.7)
    scores = score_tokens(model, batch, temperature=0.7)
    for i, (logps, _, _, mask) in enumerate(expected):
        torch.testing.assert_close(scores.logps[i, 1 : len(mask) + 1].double(), logps * mask, rtol=0, atol=2e-5)
    result = weighted_logp_sum(model, batch, torch.ones(batch.input_ids.shape), reweight=torch.exp, temperature=0.7)
    total = sum((logps.exp().detach() * logps * mask).sum() for logps, _, _, mask in expected)
    torch.testing.assert_close(result.total.double(), total.detach(), rtol=1e-5, atol=1e-5)
    total.backward()
    result.total.backward()
    assert_gradients(gradients(model), gradients(exact))


def test_scores_are_differentiable_with_entropy():
    given = rows()
    model = tiny_model("llama")
    batch = batch_of(given)
    scores = score_tokens(model, batch, entropy=True)
    (scores.logps.square().sum() + 0.3 * scores.entropy.sum()).backward()
    exact, expected = reference(model, given)
    sum((logps.square() * mask).sum() + 0.3 * (entropy * mask).sum() for logps, entropy, _, mask in expected).backward()
    assert_gradients(gradients(model), gradients(exact))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_gradient_checkpointing(architecture, layout, reentrant):
    batch = batch_of(rows())
    weights = torch.ones(batch.input_ids.shape)
    plain, saving = tiny_model(architecture).train(), tiny_model(architecture).train()
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    saving.enable_input_require_grads()
    for model in (plain, saving):
        choose_layout(model, layout)
        weighted_logp_sum(model, batch, weights).total.backward()
    assert_gradients(gradients(saving), gradients(plain), 1e-6)


def test_torch_compile_on_static_shapes_is_one_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model("gemma2", num_hidden_layers=1, layer_types=["sliding_attention"]).train()
    choose_layout(model, static_shapes=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for seed in range(2):
        batch = batch_of(rows(seed=seed))
        weights = torch.ones(batch.input_ids.shape)
        got = weighted_logp_sum(compiled, batch, weights)
        want = weighted_logp_sum(model, batch, weights)
        torch.testing.assert_close(got.total, want.total)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.slow
def test_torch_compile_of_a_packed_model():
    torch._dynamo.reset()
    batch = batch_of(rows())
    weights = torch.ones(batch.input_ids.shape)
    model = tiny_model("llama")
    choose_layout(model, "packed")
    want = weighted_logp_sum(model, batch, weights).total
    got = weighted_logp_sum(torch.compile(model, backend="eager"), batch, weights).total
    torch.testing.assert_close(got, want)
    torch._dynamo.reset()


OLD = pytest.mark.skipif(torch.__version__ < (2, 15), reason="traces grouped_mm in bfloat16 alone")


@pytest.mark.parametrize("architecture", ["llama", "gemma2", pytest.param("mixtral", marks=OLD), "qwen3_5"])
def test_nothing_depends_on_the_data_where_shapes_are_static(architecture):
    model = tiny_model(architecture)
    choose_layout(model, static_shapes=True)
    batch = batch_of([packed_row(rows())] if architecture != "qwen3_5" else rows())
    score_tokens(model, batch)
    known = state_of(model)
    with FakeTensorMode() as mode:
        fake = tiny_model(architecture)
        state = state_of(fake)
        state.layout = known.layout
        state.head = replace(known.head, modules=(id(fake.lm_head),))
        fakes = TokenBatch(*(mode.from_tensor(x) for x in batch))
        scores = score_tokens(fake, fakes, entropy=True)
        total = weighted_logp_sum(fake, fakes, torch.ones(batch.input_ids.shape)).total
        (total + scores.logps.sum()).backward()
    assert scores.logps.shape == batch.input_ids.shape


def test_a_copy_scores_with_its_own_weights():
    batch = batch_of(rows())
    model = tiny_model("llama")
    before = score_tokens(model, batch).logps
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    assert (score_tokens(other, batch).logps - before).abs().max() > 0.1
    torch.testing.assert_close(score_tokens(model, batch).logps, before)


def test_logits_and_generation_are_as_before():
    ids = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(3))
    model = tiny_model("gemma2")
    logits, text = model(input_ids=ids).logits, model.generate(ids, max_new_tokens=12, do_sample=False)
    score_tokens(model, batch_of(rows()))
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=0, atol=1e-5)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), text)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_head_that_is_not_linear_uses_full_logits(layout, caplog):
    class Odd(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) + hidden.mean(-1, keepdim=True)

    given = rows()
    model = tiny_model("llama")
    model.lm_head.__class__ = Odd
    choose_layout(model, layout)
    exact, expected = reference(model, given)
    batch = batch_of(given)
    scores = score_tokens(model, batch, entropy=True)
    assert "full logits are computed" in caplog.text and "Odd" in caplog.text
    for i, (logps, entropy, top1, mask) in enumerate(expected):
        here = slice(1, len(mask) + 1)
        torch.testing.assert_close(scores.logps[i, here].double(), logps * mask, rtol=0, atol=2e-5)
        torch.testing.assert_close(scores.entropy[i, here].double(), entropy * mask, rtol=0, atol=2e-5)
        assert torch.equal(scores.top1[i, here], top1 & mask)
    weighted_logp_sum(model, batch, torch.ones(batch.input_ids.shape)).total.backward()
    sum((logps * mask).sum() for logps, _, _, mask in expected).backward()
    assert_gradients(gradients(model), gradients(exact))


@pytest.mark.parametrize("what", ["shift", "softmax", "twice"])
def test_a_model_that_changes_its_logits_otherwise_uses_full_logits(what, caplog):
    from transformers import LlamaForCausalLM

    class Changed(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            if what == "shift":
                out.logits = out.logits + torch.linspace(0, 1, 128)
            elif what == "softmax":
                out.logits = torch.softmax(out.logits, -1)
            else:
                out.logits = torch.tanh(torch.tanh(out.logits))
            return out

    given = rows()
    model = tiny_model("llama")
    model.__class__ = Changed
    _, expected = reference(model, given)
    got = score_tokens(model, batch_of(given)).logps
    assert "full logits are computed" in caplog.text
    for i, (logps, _, _, mask) in enumerate(expected):
        torch.testing.assert_close(got[i, 1 : len(mask) + 1].double(), logps * mask, rtol=0, atol=2e-5)


def test_a_scale_that_changes_after_the_probe_is_noticed():
    model = tiny_model("cohere")
    batch = batch_of(rows())
    score_tokens(model, batch)
    model.logit_scale = 2.0
    with pytest.raises(ValueError, match=r"scale=2\.0"):
        score_tokens(model, batch)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_balance_loss_counts_real_tokens_alone(architecture):
    given = rows((9, 23, 4, 17))
    model = tiny_model(architecture, output_router_logits=True)
    batch = batch_of(given)
    weights = torch.ones(batch.input_ids.shape)
    values = []
    for layout, static in (("padded", False), ("padded", True), ("packed", False)):
        choose_layout(model, layout, static_shapes=static)
        model.zero_grad()
        result = weighted_logp_sum(model, batch, weights)
        result.aux_loss.backward()
        values.append((result.aux_loss.detach(), gradients(model)))
    for value, grads in values[1:]:
        torch.testing.assert_close(value, values[0][0], rtol=1e-5, atol=1e-6)
        assert_gradients(grads, values[0][1])
    silent = tiny_model(architecture)
    assert weighted_logp_sum(silent, batch, weights).aux_loss is None


def test_bfloat16_weights_score_in_float32():
    given = rows()
    model = tiny_model("llama").bfloat16()
    batch = batch_of(given)
    for layout in ("padded", "packed"):
        choose_layout(model, layout)
        scores = score_tokens(model, batch)
        assert scores.logps.dtype == torch.float32
        _, expected = reference(model, given)
        for i, (logps, _, _, mask) in enumerate(expected):
            torch.testing.assert_close(scores.logps[i, 1 : len(mask) + 1].double(), logps * mask, rtol=0, atol=0.3)
        weighted_logp_sum(model, batch, torch.ones(batch.input_ids.shape)).total.backward()
        assert model.lm_head.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_autocast_inside_the_model_call(layout):
    """As accelerate wraps a model for mixed precision: only the call itself shows the precision."""
    batch = batch_of(rows())
    model = tiny_model("gemma2").train()
    want = score_tokens(model, batch).logps

    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args, **kwargs)

    other = tiny_model("gemma2").train()
    plain = other.forward
    other.forward = forward
    choose_layout(other, layout)
    scores = score_tokens(other, batch)
    assert state_of(other).head.fused and scores.logps.dtype == torch.float32
    torch.testing.assert_close(scores.logps, want, rtol=0, atol=0.1)
    weighted_logp_sum(other, batch, torch.ones(batch.input_ids.shape)).total.backward()
    assert other.lm_head.weight.grad.dtype == torch.float32


def test_bad_arguments():
    model = tiny_model("llama")
    batch = batch_of(rows())
    with pytest.raises(ValueError, match="weights has shape"):
        weighted_logp_sum(model, batch, torch.ones(3))
    with pytest.raises(ValueError, match="input_ids"):
        score_tokens(model, TokenBatch(*(x[:, :0] for x in batch)))
    with pytest.raises(ValueError, match="no token"):
        score_tokens(model, batch._replace(segment_ids=torch.zeros_like(batch.segment_ids)))

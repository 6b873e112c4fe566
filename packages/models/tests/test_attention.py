"""The registered attention against a plain float64 computation."""

from types import SimpleNamespace

import pytest
import torch
from posttrain_collators import Padding, TokenCollator
from posttrain_models import attention, choose_layout, score_tokens, tiny_model


def reference(q, k, v, scale, bounds, window=None, softcap=None, sinks=None):
    """(1, heads, N, D) in float64, one sequence and head at a time."""
    out = torch.zeros(1, q.shape[2], q.shape[1], v.shape[3], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        for head in range(q.shape[1]):
            scores = q[0, head, start:stop].double() @ k[0, head // group, start:stop].double().T * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            at = torch.arange(stop - start)
            gap = at[:, None] - at[None, :]
            scores = scores.masked_fill((gap < 0) | (gap >= (window or 10**9)), -torch.inf)
            if sinks is not None:
                column = sinks[head].double().expand(len(at), 1)
                scores = torch.cat([scores, column], 1)
            probs = scores.softmax(-1)[:, : len(at)]
            out[0, start:stop, head] = probs @ v[0, head // group, start:stop].double()
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("extra", ["none", "softcap", "sinks"])
def test_packed_attention(kv_heads, window, extra, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)
    torch.manual_seed(0)
    lengths = [7, 1, 40, 16]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    q, k, v = (torch.randn(1, h, sum(lengths), 8, requires_grad=True) for h in (4, kv_heads, kv_heads))
    softcap = 2.0 if extra == "softcap" else None
    sinks = torch.randn(4, requires_grad=True) if extra == "sinks" else None
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4 // kv_heads)
    out, _ = attention.posttrain_attention(
        module, q, k, v, None, scaling=0.3, softcap=softcap, s_aux=sinks, sliding_window=window, cu_seq_lens_q=bounds
    )
    want = reference(q, k, v, 0.3, bounds.tolist(), window, softcap, sinks)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    direction = torch.randn_like(out)
    got = torch.autograd.grad((out * direction).sum(), inputs)
    exact = torch.autograd.grad((want * direction).sum(), inputs)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_packed_call_without_boundaries_raises():
    q = torch.randn(1, 2, 6, 8)
    module = SimpleNamespace(is_causal=True)
    with attention.packed_call(), pytest.raises(ValueError, match="did not receive the sequence boundaries"):
        attention.posttrain_attention(module, q, q, q, None)
    out, _ = attention.posttrain_attention(module, q, q, q, None)
    assert out.shape == (1, 6, 2, 8)


def test_a_packed_call_of_attention_that_is_not_causal_raises():
    q = torch.randn(1, 2, 6, 8)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="not plain causal"):
        attention.posttrain_attention(SimpleNamespace(is_causal=False), q, q, q, None, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="not plain causal"):
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
        attention.posttrain_attention(SimpleNamespace(is_causal=True), q, q, q, mask, cu_seq_lens_q=bounds)


def test_a_failed_packed_call_leaves_no_trace():
    with pytest.raises(RuntimeError), attention.packed_call():
        raise RuntimeError
    assert not attention.PACKED.active


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_packed_call_under_autocast_offers_the_kernels_its_dtype(architecture, monkeypatch):
    model = tiny_model(architecture)
    seen = []
    monkeypatch.setattr(attention, "_varlen_fits", lambda query, value, rule: seen.append((query.dtype, value.dtype)))
    choose_layout(model, "packed")
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        score_tokens(model, TokenCollator(Padding(pad_id=0))([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]))
    assert seen and set(seen) == {(torch.bfloat16, torch.bfloat16)}, "float32 weights must not rule fast kernels out"


def test_no_square_mask_in_a_packed_call():
    with attention.packed_call():
        assert attention.posttrain_mask(batch_size=1, q_length=10**6, kv_length=10**6) is None


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_padded_logits_and_generation_do_not_change(architecture):
    model = tiny_model(architecture)
    ids = torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    logits, dynamic = model(input_ids=ids, attention_mask=mask).logits, model.generate(ids, **options)
    assert choose_layout(model, "packed").name == "packed"
    assert model.config._attn_implementation == attention.NAME
    real = mask.bool()
    got = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(got[real], logits[real], rtol=0, atol=1e-5)
    assert torch.equal(model.generate(ids, **options), dynamic)
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, dynamic)

"""The registered attention against a plain float64 computation."""

from itertools import accumulate
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


def shared_reference(q, k, v, scale, families, window=None, softcap=None, sinks=None):
    """Every completion behind a copy of its prompt, one sequence after the other; its own part is kept."""
    outputs, start = [], 0
    for prompt, completions in families:
        own = list(accumulate([prompt, *completions], initial=start))
        for number, (first, stop) in enumerate(zip(own[:-1], own[1:], strict=True)):
            rows = torch.arange(first, stop)
            rows = torch.cat([torch.arange(start, start + prompt), rows]) if number else rows
            parts = (x[:, :, rows] for x in (q, k, v))
            whole = reference(*parts, scale, [0, len(rows)], window, softcap, sinks)
            outputs.append(whole[:, len(rows) - (stop - first) :])
        start = own[-1]
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 20, 60])
@pytest.mark.parametrize("extra", ["none", "softcap", "sinks", "apart"])
def test_shared_prompts(kv_heads, window, extra, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)
    if extra == "apart":
        monkeypatch.setattr(attention, "_merges", lambda *args: False)
    torch.manual_seed(0)
    families = [(7, [5, 1]), (1, [3]), (40, []), (20, [19, 1, 4]), (1, [1])]
    lengths = [n for prompt, completions in families for n in (prompt, *completions)]
    visible = [n for prompt, completions in families for n in (prompt, *(prompt + c for c in completions))]
    queries, keys = (
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32) for x in (lengths, visible)
    )
    q, k, v = (torch.randn(1, h, sum(lengths), 8, requires_grad=True) for h in (4, kv_heads, kv_heads))
    softcap = 2.0 if extra == "softcap" else None
    sinks = torch.randn(4, requires_grad=True) if extra == "sinks" else None
    module = SimpleNamespace(is_causal=True, num_key_value_groups=4 // kv_heads)
    out, _ = attention.posttrain_attention(
        module, q, k, v, None, scaling=0.3, softcap=softcap, s_aux=sinks, sliding_window=window,
        cu_seq_lens_q=queries, cu_seq_lens_k=keys,
    )  # fmt: skip
    want = shared_reference(q, k, v, 0.3, families, window, softcap, sinks)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-6)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    direction = torch.randn_like(out)
    got = torch.autograd.grad((out * direction).sum(), inputs)
    exact = torch.autograd.grad((want * direction).sum(), inputs)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_shared_prompts_in_other_precisions(dtype):
    torch.manual_seed(0)
    queries, keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 39, 43], [0, 20, 59, 83]))
    q, k, v = (torch.randn(1, 2, 43, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    module = SimpleNamespace(is_causal=True)
    out, _ = attention.posttrain_attention(module, q, k, v, None, cu_seq_lens_q=queries, cu_seq_lens_k=keys)
    assert out.dtype == dtype
    want = shared_reference(q, k, v, 8**-0.5, [(20, [19, 4])])
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=0, atol=tolerance)
    got, exact = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want))
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=5 * tolerance)


def test_the_keys_that_a_kernel_gathers():
    # Prompts of 2, 1 and no tokens with completions of 3 and 1, 2, and 4 tokens.
    queries, keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5, 6, 7, 9, 13], [0, 2, 7, 10, 11, 14, 18]))
    want = [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 6, 7, 8, 9, 10, 11, 12]
    assert attention._gather(queries, keys).tolist() == want and len(want) == keys[-1]


def test_a_packed_call_without_boundaries_raises():
    q = torch.randn(1, 2, 6, 8)
    module = SimpleNamespace(is_causal=True)
    with attention.packed_call(), pytest.raises(ValueError, match="did not receive the sequence boundaries"):
        attention.posttrain_attention(module, q, q, q, None)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    with attention.packed_call(shared=True), pytest.raises(ValueError, match="which keys its completions see"):
        attention.posttrain_attention(module, q, q, q, None, cu_seq_lens_q=bounds)
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

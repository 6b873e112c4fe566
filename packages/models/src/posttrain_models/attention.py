"""Attention that honours sequence boundaries with SDPA on any device.

Registered in transformers under the name `"posttrain"`. A packed call carries `cu_seq_lens_q`, the cumulative lengths
that FlashAttention calls `cu_seqlens`: every sequence attends to itself alone, and no N x N mask exists. A call whose
prompts are shared carries other cumulative lengths in `cu_seq_lens_k`: a segment with more keys than tokens is a
completion, and also attends to its prompt, the nearest segment before it that has as many keys as tokens. Any other
call (padded training, `generate`) runs transformers' own SDPA attention. Soft-caps and attention sinks, which SDPA
does not know, are computed explicitly in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain_models.shared_attention import SharedAttention, families

try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN = {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)
except ImportError:
    _VARLEN = False

NAME = "posttrain"
# Rows of a score matrix that are materialised at once where SDPA's causal kernel cannot be used.
BLOCK = 512


class BoundaryError(ValueError):
    """A packed call reached attention without its sequence boundaries."""


@dataclass
class _Packed:
    """A plain object, not a context variable, because `torch.compile` cannot read those."""

    active: bool = False
    shared: bool = False
    calls: int = 0
    windowed: int = 0


PACKED = _Packed()


@contextmanager
def packed_call(shared: bool = False) -> Iterator[_Packed]:
    """Marks the model call inside as packed: attention then refuses to run without boundaries.

    With `shared` prompts it also refuses to run without those of the keys.
    """
    PACKED.active, PACKED.shared, PACKED.calls, PACKED.windowed = True, shared, 0, 0
    try:
        yield PACKED
    finally:
        PACKED.active = False


@dataclass(frozen=True)
class _Rule:
    """What one attention layer does besides causality."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float

    @property
    def explicit(self) -> bool:
        return self.softcap is not None or self.sinks is not None


def posttrain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query (B, heads, T, D)` to `key`, `value (B, kv_heads, S, D)`; returns `(B, T, heads, D)`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = _Rule(scale, sliding_window, softcap, s_aux, dropout)
    if cu_seq_lens_q is not None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if not causal or attention_mask is not None or kwargs.get("position_bias") is not None:
            raise BoundaryError(f"{type(module).__name__} is not plain causal attention, so it cannot run packed")
        if PACKED.active:
            PACKED.calls += 1
            PACKED.windowed += sliding_window is not None
            if PACKED.shared and cu_seq_lens_k is None:
                raise BoundaryError(f"{type(module).__name__} did not receive which keys its completions see")
        bounds = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        query, key, value = _as_autocast(query, key, value)
        if _varlen_fits(query, value, rule):
            longest = (max_length_q, max_length_q if cu_seq_lens_k is None else max_length_k)
            return _varlen(query, key, value, cu_seq_lens_q, bounds, longest, rule), None
        return _by_sequence(query, key, value, cu_seq_lens_q, bounds, rule), None
    if PACKED.active:
        raise BoundaryError(f"{type(module).__name__} did not receive the sequence boundaries of a packed batch")
    if rule.explicit:
        return _explicit_padded(query, key, value, attention_mask, rule).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def posttrain_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for a packed call, whose boundaries are passed beside it; SDPA's mask otherwise."""
    return None if PACKED.active else sdpa_mask(*args, **kwargs)


def _as_autocast(*states: Tensor) -> tuple[Tensor, ...]:
    """Float32 states in the dtype of autocast, as SDPA takes them; rotary embeddings beside float32 weights undo it."""
    kind = states[0].device.type
    if not torch.is_autocast_enabled(kind):
        return states
    return tuple(x.to(torch.get_autocast_dtype(kind)) if x.dtype == torch.float32 else x for x in states)


def _varlen_fits(query: Tensor, value: Tensor, rule: _Rule) -> bool:
    return (
        _VARLEN
        and query.is_cuda
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and not rule.explicit
        and rule.dropout == 0.0
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest: tuple[int | None, int | None],
    rule: _Rule,
) -> Tensor:
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if keys is not queries:
        where = _gather(queries, keys)
        key, value = key.index_select(0, where), value.index_select(0, where)
    # The kernel aligns the diagonal at the last query and the last key.
    window = (-1 if rule.window is None else rule.window - 1, 0)
    out = varlen_attn(
        query, key, value, queries, keys, longest[0] or query.shape[0], longest[1] or key.shape[0],
        scale=rule.scale, window_size=window, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.unsqueeze(0)


def _lengths(bounds: Tensor) -> list[int]:
    return getattr(bounds, "lengths", None) or bounds.diff().tolist()


@torch.compiler.disable
def _gather(queries: Tensor, keys: Tensor) -> Tensor:
    """Which tokens are the keys of every segment, one segment after the other; kept for the other layers."""
    where = getattr(keys, "gathered", None)
    if where is None:
        pieces = []
        for family in families(_lengths(queries), _lengths(keys)):
            prompt = range(family.prompt.start, family.prompt.stop)
            pieces.extend(prompt)
            for own in family.completions:
                pieces.extend((*prompt, *range(own.start, own.stop)))
        where = torch.tensor(pieces, device=keys.device)
        keys.gathered = where  # ty: ignore[missing-attribute]
    return where


# The lengths are data: traced, they would be compiled anew for every batch.
@torch.compiler.disable
def _by_sequence(query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, rule: _Rule) -> Tensor:
    # One split, whose backward is one concatenation: slicing would write a zero-filled gradient for every sequence.
    lengths, key_lengths = _lengths(queries), _lengths(keys)
    if rule.explicit or key.shape[1] != query.shape[1]:
        key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    if lengths != key_lengths and _merges(query, value, max(key_lengths), rule):
        groups = list(families(lengths, key_lengths))
        return SharedAttention.apply(query, key, value, rule.scale, groups).transpose(1, 2)
    prompt, outputs = None, []
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), key_lengths, strict=True)
    for q, k, v, visible in parts:
        if visible == k.shape[2]:
            prompt = k, v
        else:
            k, v = (torch.cat(pair, 2) for pair in zip(prompt, (k, v), strict=True))
        outputs.append(_one_sequence(q, k, v, rule).transpose(1, 2))
    return torch.cat(outputs, 1)


def _merges(query: Tensor, value: Tensor, longest: int, rule: _Rule) -> bool:
    """Whether plain attention to a prompt and to oneself can be computed apart and merged."""
    return (
        query.device.type == "cpu"
        and query.shape[-1] == value.shape[-1]
        and not rule.explicit
        and rule.dropout == 0.0
        and (rule.window is None or longest <= rule.window)
    )


def _one_sequence(query: Tensor, key: Tensor, value: Tensor, rule: _Rule) -> Tensor:
    """Causal attention of queries that are the last of the keys."""
    length, ahead = query.shape[2], key.shape[2] - query.shape[2]
    banded = rule.window is not None and length + ahead > rule.window
    if not rule.explicit and not banded and not ahead:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=rule.dropout, scale=rule.scale, is_causal=True
        )
    blocks = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        first = max(0, ahead + start - rule.window + 1) if rule.window is not None else 0
        rows = torch.arange(ahead + start, ahead + stop, device=query.device)
        at = rows[:, None] - torch.arange(first, ahead + stop, device=query.device)
        mask = at >= 0 if rule.window is None else (at >= 0) & (at < rule.window)
        q, k, v = query[:, :, start:stop], key[:, :, first : ahead + stop], value[:, :, first : ahead + stop]
        if rule.explicit:
            blocks.append(_explicit(q, k, v, mask, rule))
        else:
            blocks.append(
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rule.dropout, scale=rule.scale)
            )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _explicit_padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: _Rule) -> Tensor:
    key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    length = query.shape[2]
    if mask is None and length > 1:
        # As SDPA's causal flag: the first `length` keys, aligned at the upper left.
        key, value = key[:, :, :length], value[:, :, :length]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return _explicit(query, key, value, mask, rule)


def _explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: _Rule) -> Tensor:
    scores = (query @ key.transpose(2, 3)).float() * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        low = torch.finfo(torch.float32).min
        scores = scores.masked_fill(~mask, low) if mask.dtype == torch.bool else scores + mask.float()
    if rule.sinks is None:
        probs = scores.softmax(-1)
    else:
        sinks = rule.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probs = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    probs = F.dropout(probs, rule.dropout) if rule.dropout else probs
    return probs.to(value.dtype) @ value


def _repeat(states: Tensor, heads: int) -> Tensor:
    batch, kv_heads, length, dim = states.shape
    if kv_heads == heads:
        return states
    return states[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, dim).reshape(batch, heads, length, dim)


AttentionInterface.register(NAME, posttrain_attention)
AttentionMaskInterface.register(NAME, posttrain_mask)

"""Causal attention of prompts and their completions on the CPU, without masks and without copies of the prompts.

A completion's queries attend to its prompt and to itself in two kernel calls, which are merged by their log-sum-exp.
All completions of a prompt read its keys in one call. Given the merged output and log-sum-exp, the kernel's own
backward yields the exact gradient of each part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Family(NamedTuple):
    """A prompt and the completions that follow it in the row, or a sequence without any."""

    prompt: slice
    completions: tuple[slice, ...]

    @property
    def offspring(self) -> slice:
        """All completions, which lie one after the other."""
        return slice(self.prompt.stop, self.completions[-1].stop)


def families(lengths: list[int], key_lengths: list[int]) -> Iterator[Family]:
    """Segments grouped: those that have more keys than tokens belong to the one before them that has not."""
    prompt, completions, start = slice(0, 0), [], 0
    for length, keys in zip(lengths, key_lengths, strict=True):
        here = slice(start, start + length)
        start += length
        if keys > length:
            completions.append(here)
            continue
        if prompt.stop:
            yield Family(prompt, tuple(completions))
        prompt, completions = here, []
    yield Family(prompt, tuple(completions))


class SharedAttention(torch.autograd.Function):
    """Attention of `query, key, value (1, heads, N, D)` within families; returns `(1, heads, N, D)`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, groups: list[Family]) -> Tensor:
        """Every part, merged."""
        out = _like(query)
        exact = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_empty(1, query.shape[2], query.shape[1], dtype=exact).transpose(1, 2)
        for family in groups:
            for part in (family.prompt, *family.completions):
                q, k, v = query[:, :, part], key[:, :, part], value[:, :, part]
                out[:, :, part], lse[:, :, part] = _flash(q, k, v, 0.0, True, scale=scale)
            if family.completions:
                rows, columns = family.offspring, family.prompt
                q, k, v = query[:, :, rows], key[:, :, columns], value[:, :, columns]
                above, above_lse = _flash(q, k, v, 0.0, False, scale=scale)
                own, own_lse = out[:, :, rows], lse[:, :, rows]
                both = torch.logaddexp(own_lse, above_lse)
                own.copy_(own * (own_lse - both).exp()[..., None] + above * (above_lse - both).exp()[..., None])
                own_lse.copy_(both)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale, ctx.groups = scale, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of every part, added up."""
        query, key, value, out, lse = ctx.saved_tensors
        grads = dq, dk, dv = _like(query), _like(key), _like(value)

        def part(rows: slice, columns: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            arriving, q, result, total = (x[:, :, rows] for x in (grad, query, out, lse))
            k, v = key[:, :, columns], value[:, :, columns]
            return _flash_backward(arriving, q, k, v, result, total, 0.0, causal, scale=ctx.scale)

        for family in ctx.groups:
            for rows in (family.prompt, *family.completions):
                for whole, piece in zip(grads, part(rows, rows, True), strict=True):
                    whole[:, :, rows] = piece
            if family.completions:
                rows, columns = family.offspring, family.prompt
                from_query, from_key, from_value = part(rows, columns, False)
                dq[:, :, rows] += from_query
                dk[:, :, columns] += from_key
                dv[:, :, columns] += from_value
        return dq, dk, dv, None, None


def _like(states: Tensor) -> Tensor:
    # Heads innermost but one, as the kernel lays its results out and the projection after it reads them.
    batch, heads, length, dim = states.shape
    return states.new_empty(batch, length, heads, dim).transpose(1, 2)

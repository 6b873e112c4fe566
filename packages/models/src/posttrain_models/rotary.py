"""Rotary position embeddings in float32 on the CPU without the copies of a model's own chain of operations.

    out = x * cos + rotated * sin,  where x = (a, b) in halves of the last dimension and rotated = (-b, a)

The gradient is the same function with the rotation turned back. A model's own forms the negated half, the rotated
states and two products for each of queries and keys; this forms the result and adds to its halves.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"


class Rotary(torch.autograd.Function):
    """States `(..., T, D)` turned by `cos` and `sin`, which broadcast to them and get no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turned."""
        (left, right), (first, second) = states.chunk(2, -1), sin.chunk(2, -1)
        out = states * cos
        low, high = out.chunk(2, -1)
        low.addcmul_(right, first, value=-1)
        high.addcmul_(left, second)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep the angles."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # ty: ignore[incompatible-method-override]
        """Turned back."""
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return Rotary.apply(grad, cos, torch.cat((-second, -first), -1)), None, None


def fuse_rotary(base: nn.Module) -> None:
    """Let the file of a model's architecture turn float32 states on the CPU with `Rotary`, and others as it did.

    Its attention layers call a function of that file, so that all models of the architecture in the process share it.
    It is replaced where it takes the usual arguments and gives the same result on a short row; architectures that turn
    neighbours keep their own, and so do calls that turn a part of each head.
    """
    files = (sys.modules[kind.__module__] for kind in type(base).__mro__)
    file = next((file for file in files if hasattr(file, NAME)), None)
    own = getattr(file, NAME, None)
    if own is None or own.__module__ == __name__ or [*inspect.signature(own).parameters] != [*_ARGUMENTS]:
        return
    states = torch.linspace(-2, 3, 2 * 5 * 8, dtype=torch.float32, device="cpu").view(1, 2, 5, 8)
    angles = torch.linspace(-1, 2, 5 * 8, dtype=torch.float32, device="cpu").view(1, 5, 8)
    given = (states, states[:, :1], angles.cos(), angles.sin())
    try:
        same = all(torch.allclose(x, y, atol=1e-6) for x, y in zip(own(*given), _turn(*given), strict=True))
    except Exception:  # whatever it raises means that it is another
        return
    if same:
        setattr(file, NAME, _choosing(own))


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotary.apply(q, cos, sin), Rotary.apply(k, cos, sin)


_ARGUMENTS = inspect.signature(_turn).parameters


def _choosing(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own, assigned=("__name__", "__qualname__", "__doc__"))
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        plain = all(type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu" for x in (q, k, cos, sin))
        whole = q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]
        if not plain or not whole or cos.requires_grad or sin.requires_grad or torch.compiler.is_compiling():
            return own(q, k, cos, sin, unsqueeze_dim)
        return _turn(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb

"""RMSNorm in float32 on the CPU in few passes over memory, in place of a model's own chain of operations.

    y = x * r * w,  r = (mean(x^2) + eps)^(-1/2),  w = weight, or 1 + weight as in Gemma
    dx = r * (g * w - x * r * mean(g * w * x * r)),  dw = sum over tokens of g * x * r

A model's own writes out seven intermediate results and keeps three of them for the backward; this keeps `x` and `r`.
It has no second derivative.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call


class RmsNorm(torch.autograd.Function):
    """`hidden (..., H)` divided by its root mean square and multiplied by `weight (H,)`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        inverse = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        inverse.square_().div_(rows.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, weight, inverse)
        return (rows * inverse).mul_(weight).view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Both gradients, from one product of `grad` and the rows."""
        rows, weight, inverse = ctx.saved_tensors
        arriving = grad.reshape(rows.shape)
        with torch.autocast("cpu", enabled=False):
            shared = arriving * rows
            pull = shared.mv(weight).unsqueeze(1).mul_(inverse.square()).div_(-rows.shape[-1])
            grad_weight = shared.t().mv(inverse.squeeze(1)) if ctx.needs_input_grad[1] else None
            grad_rows = torch.mul(arriving, weight, out=shared).addcmul_(rows, pull).mul_(inverse)
        return grad_rows.view(grad.shape), grad_weight, None


class FusedNorm(nn.Module):
    """Put before a model's own class of norm: answers for plain float32 on the CPU, and leaves all else to it."""

    offset = 0.0  # added to the weight

    def forward(self, *states: Any, **named: Any) -> Tensor:
        """The norm of the hidden states `(..., H)`, the one argument."""
        x, weight = states[0] if len(states) == 1 and not named else None, self.weight
        plain = type(x) is Tensor and type(weight) is nn.Parameter and x.device.type == weight.device.type == "cpu"
        if not plain or not x.dtype == weight.dtype == torch.float32 or torch.compiler.is_compiling():
            return super().forward(*states, **named)
        return RmsNorm.apply(x, weight + self.offset if self.offset else weight, _eps(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the model's own class, since this one is made while a program runs."""
        _, _, *rest = super().__reduce_ex__(protocol)
        return _empty, (type(self).__mro__[2], self.offset), *rest


@functools.cache
def _fused(own: type, offset: float) -> type:
    """One class for all norms of a kind, so that what is compiled for a layer serves the next."""
    return type(own.__name__, (FusedNorm, own), {"offset": offset})


def _empty(own: type, offset: float) -> FusedNorm:
    made = _fused(own, offset)
    return made.__new__(made)


def fuse_norms(base: nn.Module) -> None:
    """Make every RMSNorm of a model a `FusedNorm`, in place, whose own forward computes this formula.

    Whether it does is seen from two short rows, one of them small enough for eps to count, and weights of the probe's
    own: a norm that has its eps elsewhere, another function of its weight, or a gate, keeps its own forward.
    """
    for module in base.modules():
        if isinstance(module, FusedNorm) or not type(module).__name__.endswith("RMSNorm") or not _simple(module):
            continue
        offset = _offset(module)
        if offset is not None:
            module.__class__ = _fused(type(module), offset)


@torch.no_grad()
def _offset(module: Any) -> float | None:
    """What the norm adds to its weight; None where it is another formula."""
    like, size, eps = {"dtype": torch.float32, "device": "cpu"}, len(module.weight), _eps(module)
    weight = torch.linspace(0.5, 1.75, size, **like)
    sample = torch.linspace(-1, 2, 2 * size, **like).view(1, 2, size)
    sample[0, 1] *= eps**0.5
    try:
        own = functional_call(module, {"weight": weight}, (sample,)).float()
    except Exception:  # whatever a norm raises here means that it is another
        return None
    ours = {offset: RmsNorm.apply(sample, weight + offset, eps) for offset in (0.0, 1.0)}
    return next((o for o, x in ours.items() if x.shape == own.shape and torch.allclose(own, x, 1e-5, 1e-6)), None)


def _simple(module: nn.Module) -> bool:
    parameters, weight = list(module.parameters()), getattr(module, "weight", None)
    if type(weight) is not nn.Parameter or len(parameters) != 1 or parameters[0] is not weight:
        return False
    whole = weight.dim() == 1 and weight.numel() > 0  # FSDP1 and ZeRO-3 leave a part of it, or nothing
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and "forward" not in module.__dict__
    return whole and plain and isinstance(_eps(module), float)


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))

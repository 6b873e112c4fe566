"""Metrics that merge: over micro-batches, steps and ranks, in any grouping, to the value of the whole."""

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor


class Metric(ABC):
    """A statistic of values seen so far, immutable; `a + b` is the statistic of the values of both.

    `state` is all there is to a metric: a 1-D tensor of a length fixed per class. Gather the states of all ranks,
    rebuild each with `from_state`, and add. It is float64 where the device has it, else float32 (MPS, Neuron), and
    stays on the device of the values until `compute` reads it, so that building and adding never wait for the device.
    Added across devices, the sum is on the CPU.

    Example:
        >>> Mean.from_state(Mean.of(2.0).state) + Mean.of(4.0)
        Mean(3.0, count=2)
    """

    size: int

    def __init__(self, state: Tensor):
        if state.shape != (self.size,):
            raise ValueError(f"state of {type(self).__name__} has shape {tuple(state.shape)}; give ({self.size},)")
        self._state = state

    @classmethod
    def from_state(cls, state: Tensor) -> Self:
        """The metric with this `state`, floating."""
        return cls(state.detach())

    @classmethod
    def of(cls, values: Tensor | float, mask: Tensor | None = None) -> Self:
        """The metric of a number, or of all elements of a tensor, detached.

        Args:
            values: number, or tensor of any shape and dtype (bool counts as 0 and 1).
            mask: bool, broadcastable to `values`; what is under False is left out, NaN included.
        """
        values = torch.as_tensor(values).detach()
        values = values.to(_dtype(values.device))
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool().expand_as(values)
        return cls(cls._measure(values.reshape(-1), mask.reshape(-1)))

    @property
    def state(self) -> Tensor:
        """What `from_state` takes; do not change it in place."""
        return self._state

    def compute(self) -> float:
        """The value; NaN if nothing was seen. Waits for the device."""
        state = self._state.cpu().double()
        return self._value(state) if self._count(state) > 0 else float("nan")

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        a, b = self._state, other._state
        if a.device != b.device:
            a, b = a.cpu(), b.cpu()
        dtype = torch.promote_types(a.dtype, b.dtype)
        return type(self)(self._merge(a.to(dtype), b.to(dtype)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.compute()}, count={self._count(self._state.cpu()):g})"

    @classmethod
    @abstractmethod
    def _measure(cls, values: Tensor, mask: Tensor) -> Tensor:
        """The state of `values` where `mask` is True, both `(n,)`."""

    @classmethod
    @abstractmethod
    def _merge(cls, a: Tensor, b: Tensor) -> Tensor:
        """The state of what two states have seen together."""

    @staticmethod
    def _count(state: Tensor) -> float:
        return state[-1].item()

    @staticmethod
    def _value(state: Tensor) -> float:
        return state[0].item()


class Mean(Metric):
    """Arithmetic mean, as total over count; `state` is `[total, count]`.

    Example:
        >>> import torch
        >>> (Mean.of(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])) + Mean.of(6.0)).compute()
        3.0
        >>> Mean.ratio(6.0, 4).compute()
        1.5
    """

    size = 2

    @classmethod
    def ratio(cls, total: Tensor | float, count: Tensor | float) -> Self:
        """The mean of `count` values that sum to `total`: a loss sum over its tokens, say."""
        device = next((x.device for x in (total, count) if isinstance(x, Tensor)), torch.device("cpu"))
        pair = [torch.as_tensor(x, device=device, dtype=_dtype(device)).detach() for x in (total, count)]
        return cls(torch.stack(pair))

    @classmethod
    def _measure(cls, values: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([torch.where(mask, values, 0).sum(), mask.sum().to(values.dtype)])

    @classmethod
    def _merge(cls, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def _value(state: Tensor) -> float:
        return (state[0] / state[1]).item()


class Min(Metric):
    """Smallest value; `state` is `[min, count]`, with min = inf at count 0.

    Example:
        >>> import torch
        >>> (Min.of(torch.tensor([3.0, 2.0])) + Min.of(5)).compute()
        2.0
    """

    size = 2

    @classmethod
    def _measure(cls, values: Tensor, mask: Tensor) -> Tensor:
        end = values.new_full((1,), float("inf"))
        low = torch.cat([torch.where(mask, values, float("inf")), end]).amin()
        return torch.stack([low, mask.sum().to(values.dtype)])

    @classmethod
    def _merge(cls, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([torch.minimum(a[0], b[0]), a[1] + b[1]])


class Max(Metric):
    """Largest value; `state` is `[max, count]`, with max = -inf at count 0.

    Example:
        >>> import torch
        >>> (Max.of(torch.tensor([3.0, 2.0])) + Max.of(5)).compute()
        5.0
    """

    size = 2

    @classmethod
    def _measure(cls, values: Tensor, mask: Tensor) -> Tensor:
        low, count = Min._measure(-values, mask)
        return torch.stack([-low, count])

    @classmethod
    def _merge(cls, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([torch.maximum(a[0], b[0]), a[1] + b[1]])


class Std(Metric):
    """Sample standard deviation, `sqrt(M2 / (count - 1))`, 0 for one value; `state` is `[mean, M2, count]`.

    M2 is the sum of squared distances from the mean, so that a small spread around a large mean keeps its digits.

    Example:
        >>> import torch
        >>> (Std.of(torch.tensor([1.0, 2.0])) + Std.of(3.0)).compute()
        1.0

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """

    size = 3

    @classmethod
    def _measure(cls, values: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum().to(values.dtype)
        mean = torch.where(mask, values, 0).sum() / count.clamp_min(1)
        return torch.stack([mean, torch.where(mask, (values - mean).square(), 0).sum(), count])

    @classmethod
    def _merge(cls, a: Tensor, b: Tensor) -> Tensor:
        count = a[2] + b[2]
        share = b[2] / count.clamp_min(1)
        gap = b[0] - a[0]
        return torch.stack([a[0] + gap * share, a[1] + b[1] + gap.square() * a[2] * share, count])

    @staticmethod
    def _value(state: Tensor) -> float:
        return (state[1] / (state[2] - 1).clamp_min(1)).sqrt().item()


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in ("cpu", "cuda", "xpu") else torch.float32

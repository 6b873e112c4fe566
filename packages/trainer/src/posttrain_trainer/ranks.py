"""Sums and metrics over the ranks that see different rows."""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, reduce
from posttrain_losses import Metric

from posttrain_trainer.sources import RunError

Packed = dict[str, tuple[type[Metric], list[float]]]


@dataclass
class Ranks:
    """This process among those that share an optimiser step's rows.

    Attributes:
        index: Place among the processes that see different rows.
        size: How many see different rows (the data-parallel size).
        replicas: How many processes see the same rows as this one (tensor parallelism).
        device: Where collectives run.
        timeout: How long processes wait for each other; None for 30 minutes.
    """

    index: int
    size: int
    replicas: int
    device: torch.device
    timeout: timedelta | None = None
    _keys: list[str] | None = field(default=None, repr=False)

    @property
    def alone(self) -> bool:
        """Whether there is no other process to talk to."""
        return self.size * self.replicas == 1

    def exchange(self, value: Any) -> list[Any]:
        """One picklable value of every process, in order; also a barrier."""
        if self.alone:
            return [value]
        meet(self.timeout)
        return gather_object([value])

    def gather(self, value: Any) -> list[Any]:
        """One picklable value of each process that sees different rows, in order."""
        return self.exchange(value)[:: self.replicas]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over data-parallel ranks."""
        return values if self.alone else reduce(values, "sum") / self.replicas

    def total_counts(self, counts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Counts summed over ranks, one collective and no wait for the device.

        The keys are united over ranks at the first call; a rank that lacks one has counted 0 of it.

        Raises:
            ValueError: If a key appears later that no rank had at first.
        """
        if self._keys is None:
            self._keys = sorted({key for keys in self.gather(sorted(counts)) for key in keys})
        for key in counts:
            if key not in self._keys:
                raise ValueError(f"method.count returned the new key {key!r}, at first there were {self._keys}: "
                                 "return the same keys for every batch")  # fmt: skip
        values = [counts.get(key, 0.0) for key in self._keys]
        dtype = precise(self.device)
        if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
            stacked = torch.stack([torch.as_tensor(value, dtype=dtype, device=self.device) for value in values])
        else:
            stacked = torch.tensor([float(value) for value in values], dtype=dtype).to(self.device)
        return dict(zip(self._keys, self.total(stacked).unbind(), strict=True))


def meet(timeout: timedelta | None) -> None:
    """Waits for every process, where the backend can tell which one does not come; elsewhere returns at once.

    Args:
        timeout: How long to wait; None for 30 minutes.

    Raises:
        RunError: On the first process, naming those that did not come before the timeout.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    try:
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        late = re.search(r"Ranks? ([0-9, ]+) failed to pass", str(error))
        if late is None:  # on the processes that wait for the first one: it has the names
            raise
        raise RunError(
            f"process {late[1].strip()} did not come where the other processes waited for it: look at what it printed "
            "last, or raise ddp_timeout if it was only slow"
        ) from error


def precise(device: torch.device) -> torch.dtype:
    """The widest floating type of a device."""
    return torch.float64 if device.type in ("cpu", "cuda", "xpu") else torch.float32


def placed(metrics: Mapping[str, Metric], device: torch.device) -> dict[str, Metric]:
    """The same metrics with their states on a device, so that adding to them does not wait for it."""
    return {name: type(metric).from_state(metric.state.to(device, precise(device))) for name, metric in metrics.items()}


def merge(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics of both sides under the union of their names."""
    merged = dict(left)
    for name, metric in right.items():
        merged[name] = merged[name] + metric if name in merged else metric
    return merged


def pack(metrics: Mapping[str, Metric]) -> Packed:
    """Metrics as plain numbers, to send or to save."""
    return {name: (type(metric), metric.state.tolist()) for name, metric in metrics.items()}


def unpack(packed: Packed) -> dict[str, Metric]:
    """The metrics that `pack` packed, on the CPU."""
    return {name: kind.from_state(torch.tensor(state, dtype=torch.float64)) for name, (kind, state) in packed.items()}


def merge_packed(parts: Iterable[Packed]) -> dict[str, Metric]:
    """Packed metrics merged in order.

    Raises:
        ValueError: If a name stands for different kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in unpack(part).items():
            if name in merged and type(merged[name]) is not type(metric):
                kinds = f"{type(merged[name]).__name__} and {type(metric).__name__}"
                raise ValueError(f"metric {name!r} is {kinds} on different ranks: use one kind for one name")
            merged = merge(merged, {name: metric})
    return merged


def compute(metrics: Mapping[str, Metric], prefix: str = "") -> dict[str, float]:
    """The numbers to log, by prefixed name."""
    return {f"{prefix}{name}": float(metric.compute()) for name, metric in metrics.items()}


def to_saved(packed: Packed) -> dict[str, list[Any]]:
    """Packed metrics with the kinds as text."""
    return {name: [kind.__module__, kind.__qualname__, state] for name, (kind, state) in packed.items()}


def from_saved(saved: Mapping[str, list[Any]]) -> Packed:
    """What `to_saved` was given.

    Raises:
        ValueError: If the module of a metric has not been imported.
    """
    packed = {}
    for name, (module, qualname, state) in saved.items():
        kind = getattr(sys.modules.get(module), qualname, None)
        if not hasattr(kind, "from_state"):
            raise ValueError(
                f"the checkpoint holds metric {name!r} of {module}.{qualname}: import {module} before resuming"
            )
        packed[name] = (kind, state)
    return packed


def ratio(totals: Mapping[str, Iterable[float]], counts: Mapping[str, float]) -> float:
    """Total sums over total counts, added over keys; nan when nothing was counted."""
    if not any(counts.values()):
        return math.nan
    return sum(math.fsum(parts) / counts[key] for key, parts in totals.items() if counts.get(key))

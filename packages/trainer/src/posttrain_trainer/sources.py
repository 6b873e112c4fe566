"""Batch sources: rows in optimiser-step order, dealt to ranks, with a state that resumes exactly."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from posttrain_trainer.method import Anchor

logger = logging.getLogger("posttrain")

Collate = Callable[..., Any]


@runtime_checkable
class BatchSource(Protocol):
    """An iterable of this rank's micro-batches that knows where it is.

    Anything with these members can be a trainer's `train_dataset`; online methods make their batches this way.
    The trainer calls `next()` only when an optimiser step needs batches, never ahead of it. Every rank must yield the
    same number of micro-batches for each optimiser step; a rank without rows yields a batch of count 0 (or an
    `Anchor`). `__len__` (micro-batches in an epoch) and `set_epoch(epoch)` are optional; without a length, `max_steps`
    is needed and the source must not end before it.
    """

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches from the current position on."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, made of tensors, numbers, strings, None, lists and dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position that `state_dict` returned."""
        ...


def is_batch_source(data: Any) -> bool:
    """Whether `data` yields batches (and not rows that are still to be batched)."""
    if isinstance(data, MapSource | StreamSource):
        return True
    rows = isinstance(data, torch.utils.data.Dataset) or type(data).__module__.startswith("datasets.")
    return not rows and isinstance(data, BatchSource)


def deal(rows: Sequence[Any], batch_size: int, world: int) -> list[list[list[Any]]]:
    """Deals the rows of one optimiser step to micro-batches and ranks.

    Args:
        rows: The step's rows, in order. Neighbours stay together.
        batch_size: The most rows in a micro-batch.
        world: How many ranks share the rows.

    Returns:
        `[micro-batch][rank] -> rows`, every row once, sizes differing by at most one.
    """
    micros = math.ceil(len(rows) / (batch_size * world))
    size, extra = divmod(len(rows), micros * world)
    ends = np.cumsum([size + (slot < extra) for slot in range(micros * world)]).tolist()
    slots = [list(rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [slots[micro * world : (micro + 1) * world] for micro in range(micros)]


def fetch(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Rows of a map-style dataset, in one call where it has a batched one."""
    indices = [int(index) for index in indices]
    if hasattr(dataset, "__getitems__") and indices:
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


class RunError(ValueError):
    """What a user has to mend, but no one can know before a run has begun."""


def _check_order(state: dict[str, Any], mine: dict[str, Any]) -> None:
    for name, value in mine.items():
        if state[name] != value:
            raise RunError(
                f"the checkpoint was written with {name}={state[name]}, this run has {name}={value}: the order of rows "
                "cannot continue; restore it, or resume with ignore_data_skip=True to begin the epoch anew"
            )


COMPLETIONS = ("chosen_ids", "rejected_ids", "completion_ids")


def completion_lengths(row: Any) -> tuple[int, ...]:
    """Tokens of the prompt of a row, and of each of its completions: an entry of the `lengths` of a shape plan.

    Args:
        row: `prompt_ids` (optional), and `chosen_ids` and `rejected_ids`, or `completion_ids`.
    """
    prompt = row["prompt_ids"] if "prompt_ids" in row else None
    return (len(prompt or ()), *(len(row[name]) for name in COMPLETIONS if name in row))


def row_length(column: str, row: Any) -> int:
    """Tokens of a row: what the column says, or of its `input_ids`, or of its prompt and completions together."""
    if column in row:
        return int(row[column])
    if "input_ids" not in row and any(name in row for name in COMPLETIONS):
        return sum(completion_lengths(row))
    return len(row["input_ids"])


def _collated(collate: Collate, rows: list[Any], spare: Any, size: int | None) -> Any:
    kwargs = {} if size is None else {"size": size}
    return collate(rows, **kwargs) if rows else Anchor(collate([spare], **kwargs))


class MapSource:
    """Batches of a map-style dataset, in an order that does not depend on how a step is split.

    In epoch `e` the rows are a permutation drawn from `(seed, e)`. Optimiser step `s` takes rows
    `[s * G, (s + 1) * G)` of it, `G = world * batch_size * accumulation`, so one batch of 32, four of 8 and eight ranks
    of 4 see the same rows in every step. No row is repeated; the last step of an epoch may be short.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        collate: Makes a batch of a list of rows: `collate(rows)`; with `fill`, `collate(rows, size=batch_size)`.
        batch_size: Rows in a micro-batch, B.
        accumulation: Micro-batches in an optimiser step.
        rank: This process's place among those that see different rows.
        world: How many processes see different rows.
        seed: Of the permutation.
        shuffle: False keeps the dataset's order in every epoch.
        drop_last: Leave out the short last step of each epoch.
        fill: Ask the collator for `batch_size` rows always, filled up with rows of count 0 (devices that compile for
            each shape).
        lengths: Order the rows of each step by length, longest first, so that rows of a micro-batch waste less
            padding: a length for each row of the dataset, or a function of a row. Rows never leave their step.

    Raises:
        ValueError: If the dataset is empty, or shorter than one step under `drop_last`.

    Example:
        >>> from posttrain_trainer import MapSource
        >>> list(MapSource([10, 11, 12, 13, 14], list, batch_size=2, shuffle=False))
        [[10, 11], [12, 13], [14]]
        >>> list(MapSource([10, 11, 12, 13, 14], list, batch_size=2, rank=1, world=2, shuffle=False))
        [[12, 13], Anchor(batch=[14])]
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        fill: bool = False,
        lengths: Sequence[int] | Callable[[Any], int] | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise ValueError("train_dataset has no rows: nothing to train on")
        self.dataset = dataset
        self.collate = collate
        self.batch_size, self.accumulation, self.rank, self.world = batch_size, accumulation, rank, world
        self.global_batch = batch_size * accumulation * world
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.fill = fill
        self.lengths = lengths
        self.epoch = 0
        self.step = 0
        if self.steps == 0:
            raise ValueError(
                f"dataloader_drop_last=True leaves no step: {len(dataset)} rows are fewer than the {self.global_batch} "
                "of one optimiser step; use a smaller batch or dataloader_drop_last=False"
            )

    @property
    def steps(self) -> int:
        """Optimiser steps in an epoch."""
        full, rest = divmod(len(self.dataset), self.global_batch)
        return full + bool(rest and not self.drop_last)

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch."""
        full, rest = divmod(len(self.dataset), self.global_batch)
        last = 0 if self.drop_last else math.ceil(rest / (self.batch_size * self.world))
        return full * self.accumulation + last

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`; the position stays when that epoch is already under way."""
        if epoch != self.epoch:
            self.epoch, self.step = epoch, 0

    def rows(self, step: int) -> list[int]:
        """Indices of all rows of an optimiser step of the current epoch, for all ranks together."""
        return self._order()[step * self.global_batch : (step + 1) * self.global_batch].tolist()

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset))

    def _deal(self, indices: list[int]) -> Iterator[Any]:
        rows = None
        if self.lengths is not None:
            if callable(self.lengths):
                rows = dict(zip(indices, fetch(self.dataset, indices), strict=True))
                length = {index: self.lengths(row) for index, row in rows.items()}
            else:
                length = {index: self.lengths[index] for index in indices}
            indices = sorted(indices, key=lambda index: -length[index])
        size = self.batch_size if self.fill else None
        for slots in deal(indices, self.batch_size, self.world):
            mine = slots[self.rank]
            wanted = mine or indices[:1]
            found = fetch(self.dataset, wanted) if rows is None else [rows[index] for index in wanted]
            yield _collated(self.collate, found if mine else [], found[0], size)

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        while self.step < self.steps:
            indices = order[self.step * self.global_batch : (self.step + 1) * self.global_batch].tolist()
            self.step += 1
            yield from self._deal(indices)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and steps taken of it, and what the order follows from."""
        return {"epoch": self.epoch, "step": self.step, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": len(self.dataset),
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; any split with the same rows in a step will do.

        Raises:
            ValueError: If the rows of a step would be others than in the run that was saved.
        """
        _check_order(state, self._identity())
        self.epoch, self.step = state["epoch"], state["step"]


class StreamSource:
    """Batches of a streaming dataset, endless: when the stream ends, its next epoch begins.

    Every rank reads the whole stream and keeps its share of each step, so steps hold the same rows however they are
    split and no rank runs dry before the others. With `buffer`, blocks of that many rows are shuffled by
    `(seed, epoch, block)`. The state names the start of the current block and the rows used of it, so a resumed
    stream goes on with exactly the row that came next, and neither replays the stream nor stores the buffer. A dataset
    without `state_dict` (or one that holds a shuffle buffer of its own, which it cannot restore) is read again from
    the start of its epoch and skipped forward.

    Args:
        dataset: Iterable of rows; `set_epoch`, `state_dict` and `load_state_dict` are used where it has them.
        collate: As for `MapSource`.
        batch_size: Rows in a micro-batch, B.
        accumulation: Micro-batches in an optimiser step.
        rank: This process's place among those that see different rows.
        world: How many processes see different rows.
        seed: Of the shuffle.
        buffer: Rows shuffled together; 0 keeps the order of the stream.
        fill: As for `MapSource`.

    Example:
        >>> from itertools import islice
        >>> from posttrain_trainer import StreamSource
        >>> list(islice(StreamSource([1, 2, 3], list, batch_size=2), 3))
        [[1, 2], [3, 1], [2, 3]]
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        buffer: int = 0,
        fill: bool = False,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.global_batch = batch_size * accumulation * world
        self.seed, self.buffer = seed, buffer
        self.fill = fill
        self._resumable = _resumes_exactly(dataset)
        self._position: dict[str, Any] = {"epoch": 0, "block": 0, "used": 0, "dataset": None}

    def _blocks(self) -> Iterator[list[Any]]:
        """Blocks from the current position on; the position follows."""
        size = self.buffer or self.global_batch
        position = self._position
        while True:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(position["epoch"])
            if position["dataset"] is not None:
                self.dataset.load_state_dict(position["dataset"])
            rows = iter(self.dataset)
            if position["dataset"] is None:
                next(islice(rows, position["block"] * size, position["block"] * size), None)
            while block := list(islice(rows, size)):
                if self.buffer:
                    key = [self.seed, position["epoch"], position["block"]]
                    block = [block[index] for index in np.random.default_rng(key).permutation(len(block))]
                yield block
                state = self.dataset.state_dict() if self._resumable else None
                position = {**position, "block": position["block"] + 1, "used": 0, "dataset": state}
                self._position = position
            if position["block"] == 0:
                raise RunError(
                    "train_dataset has no rows: the stream ended before its first row (rows without a target are "
                    "left out of it)"
                )
            position = self._position = {"epoch": position["epoch"] + 1, "block": 0, "used": 0, "dataset": None}

    def _rows(self) -> Iterator[Any]:
        used = self._position["used"]
        for block in self._blocks():
            for index in range(used, len(block)):
                self._position["used"] = index + 1
                yield block[index]
            used = 0

    def __iter__(self) -> Iterator[Any]:
        rows = self._rows()
        size = self.batch_size if self.fill else None
        while True:
            step = list(islice(rows, self.global_batch))
            for slots in deal(step, self.batch_size, self.world):
                yield _collated(self.collate, slots[self.rank], step[0], size)

    def state_dict(self) -> dict[str, Any]:
        """The start of the current block, the rows used of it, and what the order follows from."""
        return {**self._position, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "buffer": self.buffer, "global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: If the order of rows would be another than in the run that was saved.
        """
        _check_order(state, self._identity())
        self._position = {name: state[name] for name in self._position}


def _resumes_exactly(dataset: Any) -> bool:
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    inner = getattr(dataset, "_ex_iterable", None)
    while inner is not None:
        if "BufferShuffled" in type(inner).__name__:
            logger.warning(
                "train_dataset holds a shuffle buffer, which datasets cannot restore: a resumed run reads the stream "
                "again up to its position. Drop .shuffle() and set shuffle_buffer instead to resume at once"
            )
            return False
        inner = getattr(inner, "ex_iterable", None)
    return True


class EvaluationSource:
    """Batches for one pass over an evaluation dataset, every row once, in order.

    Batches are the same whatever the number of ranks: rank `r` of `W` takes batches `r, r + W, ...`. All ranks yield
    equally many; one that runs out yields `Anchor`s.

    Args:
        dataset: Map-style or iterable.
        collate: As for `MapSource`.
        batch_size: Rows in a batch, B.
        rank: This process's place among those that see different rows.
        world: How many processes see different rows.
        fill: As for `MapSource`.

    Example:
        >>> from posttrain_trainer.sources import EvaluationSource
        >>> list(EvaluationSource([1, 2, 3], list, batch_size=2, rank=1, world=2))
        [[3]]
    """

    def __init__(
        self, dataset: Any, collate: Collate, *, batch_size: int, rank: int = 0, world: int = 1, fill: bool = False
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.batch_size, self.rank, self.world, self.fill = batch_size, rank, world, fill

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil(len(self.dataset) / (self.batch_size * self.world))

    def _rounds(self) -> Iterator[tuple[list[Any], Any]]:
        """For each round: this rank's rows, and a row of another rank."""
        size = self.batch_size * self.world
        start = self.rank * self.batch_size
        if hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__"):
            for first in range(0, len(self.dataset), size):
                stop = min(len(self.dataset), first + start + self.batch_size)
                mine = fetch(self.dataset, range(first + start, stop))
                yield mine, (mine or fetch(self.dataset, [first]))[0]
        else:
            rows = iter(self.dataset)
            while group := list(islice(rows, size)):
                yield group[start : start + self.batch_size], group[0]

    def __iter__(self) -> Iterator[Any]:
        for mine, spare in self._rounds():
            yield _collated(self.collate, mine, spare, self.batch_size if self.fill else None)

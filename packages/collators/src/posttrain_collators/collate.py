"""Rows of token ids to one batch of fixed shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from posttrain_collators.padding import Padding, as_list, pad_sequences


class TokenBatch(NamedTuple):
    """A batch of rows, each holding one sequence (padded) or several (packed). B rows, T positions.

    Attributes:
        input_ids: `(B, T)` int64, the tokens.
        loss_mask: `(B, T)` bool, True where the token itself is a target, that is, where it is to be predicted from
            those before it in its sequence. Never True at the first token of a sequence, nor on padding.
        segment_ids: `(B, T)` int32, 0 on padding; 1, 2, ... number the sequences of a row.
        position_ids: `(B, T)` int64, counted from 0 in each sequence; 0 on padding.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    segment_ids: torch.Tensor
    position_ids: torch.Tensor


class _Row(NamedTuple):
    input_ids: list[int]
    loss_mask: list[bool]
    segment_ids: list[int]
    position_ids: list[int]


@dataclass(frozen=True)
class TokenCollator:
    """Turn tokenised rows into a `TokenBatch` whose width `padding` chooses.

    A row is a mapping with
    - `input_ids`: the tokens; an empty row counts as a filler row;
    - `loss_mask` (optional): which tokens are targets, or `labels`: -100 where a token is none, else the token itself.
      Without either every token is a target;
    - `seq_lengths` (optional): the lengths of the sequences that a packed row consists of, in order.

    Other keys are ignored. Nothing but the width depends on the data, and the width is one that `padding` allows.

    Args:
        padding: The pad token, the side, and the widths.

    Example:
        >>> collate = TokenCollator(Padding(pad_id=0, multiple_of=4))
        >>> batch = collate([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}])
        >>> batch.segment_ids.tolist()
        [[1, 1, 1, 2, 2, 0, 0, 0]]
        >>> batch.position_ids.tolist()
        [[0, 1, 2, 0, 1, 0, 0, 0]]
        >>> batch.loss_mask.int().tolist()
        [[0, 1, 1, 0, 1, 0, 0, 0]]
    """

    padding: Padding

    def __call__(self, rows: Sequence[Mapping[str, Any]], size: int | None = None) -> TokenBatch:
        """Collate `rows`.

        Args:
            rows: The rows; may be empty if `size` is given (a rank that has none left still takes part).
            size: B. Filler rows (one pad token, a sequence of its own, no target) make up the number.

        Raises:
            ValueError: For more rows than `size`, no rows at all, or a row that contradicts itself, naming it.
        """
        if size is None:
            size = len(rows)
        if size < 1:
            raise ValueError("rows is empty: pass at least one row, or `size` for a batch of filler rows.")
        if len(rows) > size:
            raise ValueError(f"size={size} is less than the {len(rows)} rows: pass fewer rows, or a larger size.")
        filler = _Row([self.padding.pad_id], [False], [1], [0])
        read = [_read_row(index, row) for index, row in enumerate(rows)]
        read = [row if row.input_ids else filler for row in read] + [filler] * (size - len(rows))
        width = self.padding.width(max(len(row.input_ids) for row in read))

        def column(values: list[Any], pad_value: int, dtype: torch.dtype) -> torch.Tensor:
            return pad_sequences(values, pad_value, width, side=self.padding.side, dtype=dtype)

        return TokenBatch(
            input_ids=column([row.input_ids for row in read], self.padding.pad_id, torch.int64),
            loss_mask=column([row.loss_mask for row in read], False, torch.bool),
            segment_ids=column([row.segment_ids for row in read], 0, torch.int32),
            position_ids=column([row.position_ids for row in read], 0, torch.int64),
        )


def _read_row(index: int, row: Mapping[str, Any]) -> _Row:
    if row.get("input_ids") is None:
        raise ValueError(f"rows[{index}] has no input_ids; its keys are {sorted(row)}.")
    input_ids = as_list(row["input_ids"])
    loss_mask = _read_loss_mask(index, row, input_ids)
    lengths = [len(input_ids)] if input_ids else []
    if row.get("seq_lengths") is not None:
        lengths = as_list(row["seq_lengths"])
        if sum(lengths) != len(input_ids) or any(length < 1 for length in lengths):
            raise ValueError(
                f"rows[{index}]: seq_lengths={lengths} must be positive and add up to the {len(input_ids)} input_ids."
            )
    segment_ids: list[int] = []
    position_ids: list[int] = []
    for number, length in enumerate(lengths, 1):
        loss_mask[len(segment_ids)] = False  # nothing in its sequence comes before it
        segment_ids += [number] * length
        position_ids += range(length)
    return _Row(input_ids, loss_mask, segment_ids, position_ids)


def _read_loss_mask(index: int, row: Mapping[str, Any], input_ids: list[int]) -> list[bool]:
    for name in ("loss_mask", "labels"):
        if row.get(name) is not None and len(row[name]) != len(input_ids):
            raise ValueError(
                f"rows[{index}]: {name} has {len(row[name])} values for {len(input_ids)} input_ids: write one for each."
            )
    if row.get("loss_mask") is not None:
        return [bool(value) for value in as_list(row["loss_mask"])]
    if row.get("labels") is None:
        return [True] * len(input_ids)
    labels = as_list(row["labels"])
    for position, (label, token) in enumerate(zip(labels, input_ids, strict=True)):
        if label not in (-100, token):
            raise ValueError(
                f"rows[{index}]: labels[{position}]={label} is neither -100 nor the token {token} at its own position: "
                f"labels are not shifted here, and a target is always the token itself."
            )
    return [label != -100 for label in labels]

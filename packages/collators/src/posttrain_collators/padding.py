"""The width of a batch, and rows of one width as a tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Side = Literal["right", "left"]


def check_side(side: str) -> None:
    """Refuse a padding side that is neither of the two."""
    if side not in ("right", "left"):
        raise ValueError(f"side={side!r} is unknown: write 'right' or 'left'.")


def as_list(values: Any) -> list[Any]:
    """The elements of a list, an array or a tensor."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


@dataclass(frozen=True)
class Padding:
    """How rows become one width: which token fills them, on which side, and which widths may occur.

    Few widths mean few shapes, and on a device that compiles a graph for each shape few compilations. `multiple_of`
    rounds up, so there are at most `max_length / multiple_of` widths; `widths` (from `plan_shapes`) names them all.

    Args:
        pad_id: The token id of the padding. It carries no meaning: masks tell padding by position, never by this id.
        side: "right" puts the padding after the tokens, "left" before them.
        multiple_of: Every width is a multiple of this. None leaves the width of the longest row.
        widths: The only widths that may occur, ascending; each a multiple of `multiple_of` where both are given.

    Raises:
        ValueError: For an argument that cannot be met, naming it.

    Example:
        >>> Padding(pad_id=0, multiple_of=64).width(100)
        128
        >>> Padding(pad_id=0, widths=(96, 512)).width(100)
        512
    """

    pad_id: int
    side: Side = "right"
    multiple_of: int | None = None
    widths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pad_id, int) or isinstance(self.pad_id, bool):
            raise ValueError(
                f"pad_id={self.pad_id!r} is not a token id: give the tokenizer a pad token, or use its eos."
            )
        check_side(self.side)
        if self.multiple_of is not None and self.multiple_of < 1:
            raise ValueError(f"multiple_of={self.multiple_of}: write a positive integer, or None for no rounding.")
        if self.widths is None:
            return
        object.__setattr__(self, "widths", tuple(self.widths))
        ascending = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if not self.widths or self.widths[0] < 1 or not ascending:
            raise ValueError(f"widths={self.widths}: write positive widths in ascending order, such as (256, 1024).")
        odd = [width for width in self.widths if width % (self.multiple_of or 1)]
        if odd:
            raise ValueError(f"widths={self.widths}: {odd[0]} is not a multiple of multiple_of={self.multiple_of}.")

    def width(self, longest: int) -> int:
        """Return the smallest allowed width that holds `longest` tokens; at least one.

        Raises:
            ValueError: If `longest` exceeds the widest of `widths`.
        """
        longest = max(longest, 1)
        if self.widths is None:
            multiple = self.multiple_of or 1
            return -(-longest // multiple) * multiple
        index = bisect_left(self.widths, longest)
        if index == len(self.widths):
            raise ValueError(
                f"a row of {longest} tokens is longer than the widest planned width, {self.widths[-1]}: "
                f"truncate it, or plan the widths with this row among the lengths."
            )
        return self.widths[index]


def pad_sequences(
    rows: Sequence[Sequence[int] | Sequence[float] | Sequence[bool] | torch.Tensor],
    pad_value: int | float | bool,
    width: int,
    *,
    side: Side = "right",
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Put ragged rows into one tensor of a given width.

    The shape of the result depends on `len(rows)` and `width` alone. Rows of a further level (the G completions of P
    prompts) are padded flat and viewed: `pad_sequences(flat, ...).view(P, G, width)`.

    Args:
        rows: B sequences of numbers, each of at most `width`; empty ones are allowed.
        pad_value: What stands where a row has nothing.
        width: T, the width of the result.
        side: "right" puts the padding after a row's values, "left" before them.
        dtype: The dtype of the result.

    Returns:
        A `(B, T)` tensor on the CPU.

    Raises:
        ValueError: If a row is longer than `width`, naming it.

    Example:
        >>> pad_sequences([[1, 2, 3], [4]], 0, 4, side="left").tolist()
        [[0, 1, 2, 3], [0, 0, 0, 4]]
    """
    check_side(side)
    out = torch.full((len(rows), width), pad_value, dtype=dtype)  # (B, T)
    for index, row in enumerate(rows):
        length = len(row)
        if length > width:
            raise ValueError(f"row {index} has {length} values, more than width={width}: truncate it, or widen.")
        start = 0 if side == "right" else width - length
        out[index, start : start + length] = torch.as_tensor(row, dtype=dtype)
    return out

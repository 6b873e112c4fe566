"""Several short rows in one row of a fixed capacity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

Overlong = Literal["truncate", "split", "wrap"]


class Packing(NamedTuple):
    """Where the tokens of every row go.

    Attributes:
        bins: One list for each packed row: pieces `(row, start, stop)`, the tokens `[start, stop)` of row `row`. Bins
            and the pieces in them follow the order of the data.
        kept: Tokens in the bins.
        cut: Tokens in no bin: what `overlong="truncate"` dropped. `kept + cut` is the sum of the lengths.
    """

    bins: list[list[tuple[int, int, int]]]
    kept: int
    cut: int


def pack(lengths: Iterable[int] | torch.Tensor, capacity: int, *, overlong: Overlong) -> Packing:
    """Fill packed rows of `capacity` tokens from the whole data set at once.

    "truncate" and "split" use best-fit decreasing: rows from the longest to the shortest, each into the fullest packed
    row that still has room (at most 11/9 of the fewest possible bins, plus one; usually within a percent of the sum of
    lengths over capacity). They differ in what happens to a row of more than `capacity` tokens. "wrap" lays all rows
    end to end and cuts every `capacity` tokens, so almost every row is full, but rows are cut wherever that falls.

    All rows of one length are placed together, and all open bins with the same room are one entry, so a million rows
    take seconds. The result depends on nothing but the arguments.

    Args:
        lengths: The number of tokens of each row; rows of 0 tokens are left out.
        capacity: The most tokens a packed row may hold.
        overlong: "truncate" keeps the first `capacity` tokens of a row and drops the rest (TRL's `bfd`),
            "split" cuts a row into pieces of `capacity` tokens and a rest (`bfd_split`), "wrap" concatenates and
            cuts (`wrapped`).

    Returns:
        The bins, and how many tokens were kept and cut.

    Raises:
        ValueError: For a capacity below 1, a negative length (naming its row) or an unknown `overlong`.

    References:
        Johnson, "Near-optimal bin packing algorithms" (1973); Ding et al., "Fewer Truncations Improve Language
        Modeling" (2024), https://arxiv.org/abs/2404.10830.

    Example:
        >>> pack([5, 3, 9, 2], 8, overlong="truncate")
        Packing(bins=[[(0, 0, 5), (1, 0, 3)], [(2, 0, 8)], [(3, 0, 2)]], kept=18, cut=1)
        >>> pack([5, 3, 9, 2], 8, overlong="split").bins
        [[(0, 0, 5), (1, 0, 3)], [(2, 0, 8)], [(2, 8, 9), (3, 0, 2)]]
        >>> pack([5, 3, 9, 2], 8, overlong="wrap").bins
        [[(0, 0, 5), (1, 0, 3)], [(2, 0, 8)], [(2, 8, 9), (3, 0, 2)]]
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: write a positive number of tokens.")
    if overlong not in ("truncate", "split", "wrap"):
        raise ValueError(f"overlong={overlong!r} is unknown: write 'truncate', 'split' or 'wrap'.")
    values: list[int] = lengths.tolist() if isinstance(lengths, torch.Tensor) else [int(length) for length in lengths]
    if values and min(values) < 0:
        row = next(row for row, length in enumerate(values) if length < 0)
        raise ValueError(f"lengths[{row}]={values[row]}: a row cannot have a negative number of tokens.")
    if overlong == "wrap":
        return Packing(_wrap(values, capacity), sum(values), 0)

    full: list[list[tuple[int, int, int]]] = []
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # by length, at most `capacity`
    cut = 0
    for row, length in enumerate(values):
        start = 0
        if length > capacity:
            if overlong == "truncate":
                cut += length - capacity
                length = capacity
            else:
                while length - start > capacity:
                    full.append([(row, start, start + capacity)])
                    start += capacity
        if length > start:
            pieces.setdefault(length - start, []).append((row, start, length))
    bins = full + _best_fit_decreasing(pieces, capacity)
    for pieces_of_bin in bins:
        pieces_of_bin.sort()
    bins.sort()
    return Packing(bins, sum(values) - cut, cut)


def _best_fit_decreasing(
    pieces: dict[int, list[tuple[int, int, int]]], capacity: int
) -> list[list[tuple[int, int, int]]]:
    bins: list[list[tuple[int, int, int]]] = []
    open_bins: dict[int, list[list[tuple[int, int, int]]]] = {}  # by room left
    rooms = _Rooms(capacity)
    for length in sorted(pieces, reverse=True):
        waiting = pieces[length]
        placed = 0
        while placed < len(waiting):
            room = rooms.at_least(length)
            # A bin that takes a piece and still has room for another now has the least room of all that fit, so the
            # next piece of this length goes there too: a bin takes all it can hold at once.
            each = (room or capacity) // length
            wanted = -(-(len(waiting) - placed) // each)
            if room is None:
                taken: list[list[tuple[int, int, int]]] = [[] for _ in range(wanted)]
                bins += taken
                room = capacity
            else:
                candidates = open_bins[room]
                taken = candidates[-wanted:]
                del candidates[-wanted:]
                if not candidates:
                    rooms.remove(room)
            for target in taken:
                chunk = waiting[placed : placed + each]
                placed += len(chunk)
                target += chunk
                left = room - length * len(chunk)
                if left:
                    same_room = open_bins.setdefault(left, [])
                    if not same_room:
                        rooms.add(left)
                    same_room.append(target)
    return bins


class _Rooms:
    """A set of integers up to `capacity` with "the least that is at least": words of bits, and a bit for each word."""

    def __init__(self, capacity: int) -> None:
        self.shift = max(6, capacity.bit_length() // 2)
        self.words = [0] * ((capacity >> self.shift) + 1)
        self.used = 0

    def add(self, room: int) -> None:
        word = room >> self.shift
        self.words[word] |= 1 << (room - (word << self.shift))
        self.used |= 1 << word

    def remove(self, room: int) -> None:
        word = room >> self.shift
        self.words[word] &= ~(1 << (room - (word << self.shift)))
        if not self.words[word]:
            self.used &= ~(1 << word)

    def at_least(self, room: int) -> int | None:
        word = room >> self.shift
        bits = self.words[word] >> (room - (word << self.shift))
        if bits:
            return room + (bits & -bits).bit_length() - 1
        later = self.used >> (word + 1)
        if not later:
            return None
        word += (later & -later).bit_length()
        bits = self.words[word]
        return (word << self.shift) + (bits & -bits).bit_length() - 1


def _wrap(lengths: list[int], capacity: int) -> list[list[tuple[int, int, int]]]:
    bins: list[list[tuple[int, int, int]]] = []
    room = 0
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                bins.append([])
                room = capacity
            stop = min(length, start + room)
            bins[-1].append((row, start, stop))
            room -= stop - start
            start = stop
    return bins

"""Which widths to allow, given the lengths of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from math import comb

import torch


def plan_shapes(
    lengths: Iterable[int] | torch.Tensor, max_shapes: int, *, multiple_of: int = 1, batch_size: int = 1
) -> tuple[int, ...]:
    """Choose the widths that minimise padded tokens, given how many different widths may occur.

    With `batch_size=1` the objective is the sum over rows of `width - length`, each row alone padded to the smallest
    width that holds it: right for packed rows, and for batches of rows sorted by length. With `batch_size=n` it is the
    expected padding of a batch of n different rows drawn at random and padded to its longest. Both are solved exactly,
    in integers: dynamic programming over the D distinct rounded lengths. A width is one of them, and

        cost[k][j] = min over i < j of  cost[k-1][i] + width_j * (count_j - count_i)

    with count_j the number of rows (or batches) whose longest is at most width_j. Read as lines in width_j, the
    minimum over i is the lower envelope of lines whose slopes fall as i grows, so each k takes O(D) steps; O(max_shapes
    * D) in all, besides counting the lengths once.

    Args:
        lengths: The number of tokens of every row (a list, an array, a tensor, a column).
        max_shapes: K, how many widths there may be at most.
        multiple_of: Every width is a multiple of this.
        batch_size: Rows a batch has.

    Returns:
        At most `max_shapes` widths, ascending. The last holds the longest row.

    Raises:
        ValueError: If `lengths` is empty or negative, or another argument is below 1.

    Example:
        >>> plan_shapes([10, 11, 12, 100], max_shapes=2)
        (12, 100)
        >>> plan_shapes([10, 11, 12, 100], max_shapes=2, multiple_of=64)
        (64, 128)
    """
    for name, value in (("max_shapes", max_shapes), ("multiple_of", multiple_of), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: write a positive integer.")
    if isinstance(lengths, torch.Tensor):  # its elements are tensors, which hash by identity
        lengths = lengths.tolist()
    histogram: Counter[int] = Counter()
    for length, rows in Counter(lengths).items():
        if length < 0:
            raise ValueError(f"lengths holds {length}: write the number of tokens of every row.")
        histogram[-(-max(int(length), 1) // multiple_of) * multiple_of] += rows
    if not histogram:
        raise ValueError("lengths is empty: there is nothing to plan widths for.")

    widths = sorted(histogram)
    counts = list(accumulate(histogram[width] for width in widths))
    batch_size = min(batch_size, counts[-1])
    counts = [comb(count, batch_size) for count in counts]
    return _best_widths(widths, counts, max_shapes)


def _best_widths(widths: list[int], counts: list[int], max_shapes: int) -> tuple[int, ...]:
    """Solve the recurrence of `plan_shapes`; `counts[j]` is cumulative."""
    distinct = len(widths)
    cost = [width * count for width, count in zip(widths, counts, strict=True)]  # one width for everything up to j
    choices: list[list[int]] = []
    for _ in range(1, min(max_shapes, distinct)):
        # At most k widths: -1 keeps the solution with fewer, which can only happen for the shortest lengths.
        new, choice = list(cost), [-1] * distinct
        hull: list[int] = []
        head = 0
        for j in range(1, distinct):
            _add_line(hull, j - 1, cost, counts, head)
            head = min(head, len(hull) - 1)
            while head + 1 < len(hull) and _line(hull[head + 1], widths[j], cost, counts) <= _line(
                hull[head], widths[j], cost, counts
            ):
                head += 1
            value = widths[j] * counts[j] + _line(hull[head], widths[j], cost, counts)
            if value < new[j]:
                new[j], choice[j] = value, hull[head]
        cost = new
        choices.append(choice)

    chosen, j = [widths[-1]], distinct - 1
    for choice in reversed(choices):
        if choice[j] >= 0:
            j = choice[j]
            chosen.append(widths[j])
    return tuple(reversed(chosen))


def _line(i: int, width: int, cost: list[int], counts: list[int]) -> int:
    return cost[i] - counts[i] * width


def _add_line(hull: list[int], new: int, cost: list[int], counts: list[int], head: int) -> None:
    """Append line `new`, whose slope is the lowest so far, and drop those that it keeps from ever being the minimum."""
    while len(hull) - head >= 2:
        first, last = hull[-2], hull[-1]
        # `last` is beaten before it beats `first`; both differences of counts are positive, so no division is needed.
        left = (cost[new] - cost[first]) * (counts[last] - counts[first])
        right = (cost[last] - cost[first]) * (counts[new] - counts[first])
        if left > right:
            break
        hull.pop()
    hull.append(new)

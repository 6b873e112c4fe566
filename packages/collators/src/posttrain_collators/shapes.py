"""Which widths to allow, given the lengths of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import comb
from typing import Any

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
    _check(max_shapes=max_shapes, multiple_of=multiple_of, batch_size=batch_size)
    widths, counts = _count(lengths, multiple_of, batch_size, "lengths")
    return _best_widths(widths, counts, max_shapes)[0]


def plan_completion_shapes(
    prompt_lengths: Iterable[int] | torch.Tensor,
    completion_lengths: Iterable[int | Sequence[int]] | torch.Tensor,
    max_shapes: int,
    *,
    multiple_of: int = 1,
    batch_size: int = 1,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose widths for prompts and widths for their completions, given how many pairs of the two may occur.

    A batch of P prompts with G completions each has one width for prompts, Tp, and one for completions, Tc, so a plan
    of m and n widths has m * n shapes. The objective is what `plan_shapes` minimises, of the `P * Tp + P * G * Tc`
    tokens of a batch. Both parts are solved exactly for each m with the largest n that `m * n <= max_shapes` allows,
    and the best pair is taken; with equal tokens, the one with fewer shapes.

    Args:
        prompt_lengths: The number of prompt tokens of every row.
        completion_lengths: For every row the number of tokens of its completion, or of each of its completions.
        max_shapes: How many pairs of widths there may be at most.
        multiple_of: Every width is a multiple of this.
        batch_size: Rows a batch has.

    Returns:
        The widths of prompts and those of completions, each ascending. The last hold the longest.

    Raises:
        ValueError: If lengths are missing, negative, or of different numbers of rows, or another argument is below 1.

    Example:
        >>> plan_completion_shapes([10, 11, 90], [(4, 5), (3, 30), (5, 5)], max_shapes=2)
        ((11, 90), (30,))
        >>> plan_completion_shapes([10, 11, 12], [5, 5, 60], max_shapes=2, multiple_of=8)
        ((16,), (8, 64))
    """
    _check(max_shapes=max_shapes, multiple_of=multiple_of, batch_size=batch_size)
    prompts, found = _as_list(prompt_lengths), _as_list(completion_lengths)
    if len(prompts) != len(found):
        raise ValueError(
            f"prompt_lengths has {len(prompts)} rows and completion_lengths {len(found)}: write one entry for each row."
        )
    each = max((len(row) for row in found if isinstance(row, list | tuple)), default=1)  # G
    longest: list[int] = []
    for index, row in enumerate(found):
        if isinstance(row, list | tuple):
            if not row or min(row) < 0:
                raise ValueError(f"completion_lengths[{index}]={row}: write the number of tokens of each completion.")
            row = max(row)
        longest.append(row)
    prompt_counts = _count(prompts, multiple_of, batch_size, "prompt_lengths")
    counts = _count(longest, multiple_of, batch_size, "completion_lengths")
    plans = []
    for number in {max_shapes // other for other in range(1, min(max_shapes, len(counts[0])) + 1)}:
        prompt_widths, prompt_cost = _best_widths(*prompt_counts, number)
        widths, cost = _best_widths(*counts, max_shapes // number)
        plans.append((prompt_cost + each * cost, len(prompt_widths) * len(widths), prompt_widths, widths))
    return min(plans)[2:]


def _check(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value}: write a positive integer.")


def _as_list(values: Iterable[Any] | torch.Tensor) -> list[Any]:
    # The elements of a tensor are tensors, which hash by identity.
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _count(
    lengths: Iterable[int] | torch.Tensor, multiple_of: int, batch_size: int, name: str
) -> tuple[list[int], list[int]]:
    """The distinct rounded lengths, and for each how many batches have a longest row of at most that."""
    if isinstance(lengths, torch.Tensor):
        lengths = _as_list(lengths)
    histogram: Counter[int] = Counter()
    for length, rows in Counter(lengths).items():
        if length < 0:
            raise ValueError(f"{name} holds {length}: write the number of tokens of every row.")
        histogram[-(-max(int(length), 1) // multiple_of) * multiple_of] += rows
    if not histogram:
        raise ValueError(f"{name} is empty: there is nothing to plan widths for.")
    widths = sorted(histogram)
    counts = list(accumulate(histogram[width] for width in widths))
    batch_size = min(batch_size, counts[-1])
    return widths, [comb(count, batch_size) for count in counts]


def _best_widths(widths: list[int], counts: list[int], max_shapes: int) -> tuple[tuple[int, ...], int]:
    """Solve the recurrence of `plan_shapes`, `counts[j]` being cumulative: the widths, and their cost."""
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
    return tuple(reversed(chosen)), cost[-1]


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

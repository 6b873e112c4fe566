import random
from itertools import combinations

import pytest
import torch
from posttrain_collators import Padding, plan_shapes


def total(lengths, widths, batch_size=1):
    """Padded width summed over every batch of `batch_size` rows."""
    return sum(min(w for w in widths if w >= max(1, *batch)) for batch in combinations([0, *lengths][1:], batch_size))


def row_total(lengths, widths):
    return sum(min(w for w in widths if w >= max(1, length)) for length in lengths)


def brute_force(lengths, max_shapes, multiple_of, cost):
    top = -(-max(1, *lengths, 1) // multiple_of) * multiple_of
    candidates = list(range(multiple_of, top, multiple_of))
    plans = [(*c, top) for k in range(min(max_shapes, len(candidates) + 1)) for c in combinations(candidates, k)]
    return min(cost(lengths, plan) for plan in plans)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(0, 14) for _ in range(rng.randrange(1, 12))]
    max_shapes, multiple_of = rng.randrange(1, 5), rng.choice([1, 1, 2, 3])
    widths = plan_shapes(lengths, max_shapes, multiple_of=multiple_of)
    assert list(widths) == sorted(set(widths)) and len(widths) <= max_shapes
    assert all(width % multiple_of == 0 for width in widths)
    assert widths[-1] >= max(lengths) > widths[-1] - multiple_of or max(lengths) == 0
    assert row_total(lengths, widths) == brute_force(lengths, max_shapes, multiple_of, row_total)


@pytest.mark.parametrize("seed", range(30))
def test_batches_equal_brute_force(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 9) for _ in range(rng.randrange(2, 8))]
    batch_size = rng.randrange(2, min(4, len(lengths)) + 1)
    widths = plan_shapes(lengths, 3, batch_size=batch_size)

    def cost(lengths, plan):
        return total(lengths, plan, batch_size)

    assert cost(lengths, widths) == brute_force(lengths, 3, 1, cost)


def test_larger_case_equals_quadratic_dynamic_programming():
    rng = random.Random(1)
    lengths = [int(rng.lognormvariate(5, 0.8)) + 1 for _ in range(3000)]
    values = sorted(set(lengths))
    count = [sum(length <= v for length in lengths) for v in values]
    cost = [v * c for v, c in zip(values, count, strict=True)]
    for _ in range(4):
        cost = [
            min([cost[j], *(cost[i] + values[j] * (count[j] - count[i]) for i in range(j))]) for j in range(len(values))
        ]
    assert row_total(lengths, plan_shapes(lengths, 5)) == cost[-1]


def test_enough_shapes_pad_nothing():
    assert plan_shapes([3, 1, 3, 7], 10) == (1, 3, 7)


def test_one_shape_is_the_longest():
    assert plan_shapes([3, 1, 3, 7], 1, multiple_of=4) == (8,)


def test_equal_lengths_and_empty_rows():
    assert plan_shapes([5, 5, 5], 3) == (5,)
    assert plan_shapes([0, 0], 2, multiple_of=8) == (8,)


def test_batch_larger_than_the_data_is_the_whole_data():
    assert plan_shapes([1, 2, 9], 3, batch_size=64) == (9,)


def test_accepts_tensors_and_serves_padding():
    lengths = torch.tensor([10, 11, 12, 100])
    widths = plan_shapes(lengths, 2)
    assert widths == (12, 100)
    assert [Padding(0, widths=widths).width(int(n)) for n in lengths] == [12, 12, 12, 100]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([], 2), "lengths is empty"),
        (([-1, 2], 2), "lengths holds -1"),
        (([1], 0), "max_shapes=0"),
    ],
)
def test_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        plan_shapes(*arguments)


def test_refuses_multiple_and_batch_size():
    with pytest.raises(ValueError, match="multiple_of=0"):
        plan_shapes([1], 1, multiple_of=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        plan_shapes([1], 1, batch_size=0)

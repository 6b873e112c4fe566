import random
from collections import Counter

import pytest
import torch
from posttrain_collators import pack

STRATEGIES = ("truncate", "split", "wrap")


def random_lengths(rng):
    capacity = rng.choice([1, 2, 7, 16, 33, 100, 1000])
    high = rng.choice([1, capacity // 3 + 1, capacity, 3 * capacity])
    return [rng.randrange(0, high + 1) for _ in range(rng.randrange(0, 200))], capacity


def naive_best_fit_decreasing(lengths, capacity):
    """Row by row, searching all bins."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    return Counter(capacity - room for room in rooms)


def fill(pieces):
    return sum(stop - start for _, start, stop in pieces)


@pytest.mark.parametrize("overlong", STRATEGIES)
@pytest.mark.parametrize("seed", range(60))
def test_invariants(seed, overlong):
    lengths, capacity = random_lengths(random.Random(seed))
    packing = pack(lengths, capacity, overlong=overlong)
    seen = Counter()
    for pieces in packing.bins:
        assert 0 < fill(pieces) <= capacity
        assert pieces == sorted(pieces)
        for row, start, stop in pieces:
            assert start < stop
            seen.update((row, token) for token in range(start, stop))
    limit = capacity if overlong == "truncate" else max(lengths, default=0)
    expected = Counter((row, token) for row, length in enumerate(lengths) for token in range(min(length, limit)))
    assert seen == expected  # every token exactly once
    assert packing.bins == sorted(packing.bins)
    assert packing.kept == len(seen) and packing.kept + packing.cut == sum(lengths)
    assert overlong == "truncate" or packing.cut == 0


@pytest.mark.parametrize("seed", range(40))
def test_is_best_fit_decreasing(seed):
    lengths, capacity = random_lengths(random.Random(seed))
    packing = pack(lengths, capacity, overlong="truncate")
    pieces = [min(length, capacity) for length in lengths if length]
    assert Counter(fill(b) for b in packing.bins) == naive_best_fit_decreasing(pieces, capacity)

    packing = pack(lengths, capacity, overlong="split")
    pieces = [capacity] * sum(length // capacity for length in lengths)
    pieces += [length % capacity for length in lengths if length % capacity]
    assert Counter(fill(b) for b in packing.bins) == naive_best_fit_decreasing(pieces, capacity)


@pytest.mark.parametrize("capacity", [1000, 1024])  # a capacity that is no power of two packs as well
def test_nearly_meets_the_lower_bound(capacity):
    rng = random.Random(0)
    lengths = [max(1, int(rng.lognormvariate(5, 0.8))) for _ in range(20_000)]
    packing = pack(lengths, capacity, overlong="truncate")
    assert len(packing.bins) <= 1.01 * -(-packing.kept // capacity)


def test_uses_the_whole_data_set():
    # The two halves fit only together; a blockwise packer would leave 2000 half-empty bins.
    lengths = [7] * 1000 + [3] * 1000
    assert len(pack(lengths, 10, overlong="truncate").bins) == 1000


def test_wrap_fills_every_bin_but_the_last():
    packing = pack([5, 0, 9, 4], 6, overlong="wrap")
    assert packing.bins == [[(0, 0, 5), (2, 0, 1)], [(2, 1, 7)], [(2, 7, 9), (3, 0, 4)]]


def test_split_keeps_the_rest_of_a_long_row():
    packing = pack([25, 4], 10, overlong="split")
    assert packing.bins == [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 25), (1, 0, 4)]]
    assert packing.kept == 29


@pytest.mark.parametrize("overlong", STRATEGIES)
def test_nothing_to_pack(overlong):
    assert pack([], 4, overlong=overlong) == ([], 0, 0)
    assert pack([0, 0], 4, overlong=overlong) == ([], 0, 0)
    assert pack([0, 4], 4, overlong=overlong).bins == [[(1, 0, 4)]]


def test_deterministic_and_accepts_tensors():
    lengths, capacity = random_lengths(random.Random(3))
    assert pack(torch.tensor(lengths), capacity, overlong="split") == pack(lengths, capacity, overlong="split")


@pytest.mark.parametrize(
    ("lengths", "capacity", "overlong", "match"),
    [
        ([1], 0, "split", "capacity=0"),
        ([3, -2], 4, "split", r"lengths\[1\]=-2"),
        ([1], 4, "bfd", "overlong='bfd'"),
    ],
)
def test_refuses(lengths, capacity, overlong, match):
    with pytest.raises(ValueError, match=match):
        pack(lengths, capacity, overlong=overlong)

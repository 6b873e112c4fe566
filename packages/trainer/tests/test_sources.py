from itertools import islice

import datasets
import numpy as np
import pytest
from posttrain_trainer import Anchor, MapSource, StreamSource
from posttrain_trainer.sources import EvaluationSource, completion_lengths, deal, is_batch_source, row_length

SPLITS = [(32, 1, 1), (8, 4, 1), (4, 8, 1), (4, 4, 2), (16, 1, 2), (1, 8, 4), (8, 1, 4)]


def step_rows(count, batch_size, accumulation, world, epoch=0, **options):
    """Rows of each optimiser step, over all ranks, as sorted lists; and how many micro-batches each rank had."""
    steps: dict[int, list[int]] = {}
    lengths = []
    for rank in range(world):
        source = MapSource(
            list(range(count)),
            list,
            batch_size=batch_size,
            accumulation=accumulation,
            rank=rank,
            world=world,
            seed=5,
            **options,
        )
        source.set_epoch(epoch)
        batches = list(source)
        assert len(batches) == len(source)
        lengths.append(len(batches))
        for index, batch in enumerate(batches):
            assert isinstance(batch, Anchor) or 0 < len(batch) <= batch_size
            steps.setdefault(index // accumulation, []).extend([] if isinstance(batch, Anchor) else batch)
    assert len(set(lengths)) == 1  # no rank waits for another
    return [sorted(found) for found in steps.values()]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100, 129])
def test_a_step_has_the_same_rows_however_it_is_split(count):
    wanted = step_rows(count, *SPLITS[0])
    assert sorted(sum(wanted, [])) == list(range(count))  # none twice, none lost
    for split in SPLITS[1:]:
        assert step_rows(count, *split) == wanted
        assert step_rows(count, *split, lengths=lambda row: row % 7) == wanted


def test_the_order_is_drawn_from_seed_and_epoch():
    assert step_rows(64, 32, 1, 1, epoch=0) != step_rows(64, 32, 1, 1, epoch=1)
    assert step_rows(64, 32, 1, 1, epoch=1) == step_rows(64, 4, 4, 2, epoch=1)
    in_order = [list(range(32)), list(range(32, 64))]
    assert step_rows(64, 32, 1, 1, epoch=1, shuffle=False) == in_order
    # seed 1 of epoch 1 is not seed 2 of epoch 0
    one, two = MapSource(range(64), list, batch_size=1, seed=1), MapSource(range(64), list, batch_size=1, seed=2)
    one.set_epoch(1)
    assert one.rows(0) != two.rows(0) or one.rows(1) != two.rows(1)


def test_the_order_is_uniform():
    first = []
    for seed in range(600):
        first += MapSource(range(6), list, batch_size=1, seed=seed).rows(0)
    counts = np.bincount(first, minlength=6)
    assert counts.min() > 60 and counts.max() < 140


def test_drop_last_drops_the_short_step_alone():
    assert sum(step_rows(70, 8, 2, 2, drop_last=True, shuffle=False), []) == list(range(64))
    with pytest.raises(ValueError, match="dataloader_drop_last=True leaves no step: 3 rows"):
        MapSource([1, 2, 3], list, batch_size=4, drop_last=True)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="train_dataset has no rows"):
        MapSource([], list, batch_size=4)


def test_a_rank_without_rows_gets_an_anchor():
    source = MapSource([7], list, batch_size=2, rank=1, world=2)
    assert list(source) == [Anchor([7])]


def test_length_order_stays_within_the_step():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    source = MapSource(list(range(8)), list, batch_size=2, accumulation=2, shuffle=False, lengths=lengths)
    assert list(source) == [[2, 0], [1, 3], [5, 7], [4, 6]]


def test_fill_asks_the_collator_for_full_batches():
    sizes = []
    source = MapSource([1, 2, 3], lambda rows, size: sizes.append((len(rows), size)), batch_size=2, fill=True)
    list(source)
    assert sizes == [(2, 2), (1, 2)]


def test_deal_keeps_neighbours_together_and_sizes_even():
    dealt = deal(list(range(7)), 2, 2)
    assert dealt == [[[0, 1], [2, 3]], [[4, 5], [6]]]


@pytest.mark.parametrize("split", SPLITS)
def test_a_map_source_resumes_in_any_split(split):
    whole = MapSource(list(range(200)), list, batch_size=32, seed=5)
    whole.set_epoch(2)
    walk = iter(whole)
    next(walk), next(walk)
    state = whole.state_dict()
    rest = sorted(next(walk))
    batch_size, accumulation, world = split
    found = []
    for rank in range(world):
        source = MapSource(
            list(range(200)), list, batch_size=batch_size, accumulation=accumulation, rank=rank, world=world, seed=5
        )
        source.load_state_dict(state)
        source.set_epoch(2)
        for batch in islice(source, accumulation):
            found += batch
    assert sorted(found) == rest


def test_another_order_of_rows_is_refused():
    state = MapSource(list(range(100)), list, batch_size=8).state_dict()
    with pytest.raises(ValueError, match="rows=100, this run has rows=99"):
        MapSource(list(range(99)), list, batch_size=8).load_state_dict(state)
    with pytest.raises(ValueError, match="global_batch=8, this run has global_batch=4"):
        MapSource(list(range(100)), list, batch_size=4).load_state_dict(state)


def stream(count, kind):
    if kind == "list":
        return list(range(count))
    table = datasets.Dataset.from_dict({"index": list(range(count))})
    found = table.to_iterable_dataset(num_shards=3)
    return found.shuffle(seed=4, buffer_size=5) if kind == "shuffled" else found.map(lambda row: row)


def numbers(rows):
    return [row["index"] if isinstance(row, dict) else row for row in rows]


@pytest.mark.parametrize("kind", ["list", "dataset", "shuffled"])
@pytest.mark.parametrize("buffer", [0, 7])
def test_a_stream_resumes_with_the_row_that_came_next(kind, buffer):
    def source():
        return StreamSource(stream(25, kind), numbers, batch_size=4, accumulation=1, seed=9, buffer=buffer)

    whole = list(islice(source(), 20))
    assert sorted(sum(whole, [])[:25]) == list(range(25))
    for taken in (1, 3, 6, 7, 13):
        first = source()
        assert list(islice(first, taken)) == whole[:taken]
        second = source()
        second.load_state_dict(first.state_dict())
        assert list(islice(second, 20 - taken)) == whole[taken:]


def test_a_stream_is_shuffled_anew_in_each_epoch():
    rows = sum(islice(StreamSource(range(20), numbers, batch_size=20, buffer=20), 2), [])
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(20))
    assert rows[:20] != rows[20:] and rows[:20] != list(range(20))


def test_streams_of_all_splits_have_the_same_steps():
    def steps(batch_size, accumulation, world):
        found: list[list[int]] = [[] for _ in range(4)]
        for rank in range(world):
            source = StreamSource(
                range(50), numbers, batch_size=batch_size, accumulation=accumulation, rank=rank, world=world, buffer=6
            )
            for index, batch in enumerate(islice(source, 4 * accumulation)):
                found[index // accumulation] += batch
        return [sorted(rows) for rows in found]

    assert steps(16, 1, 1) == steps(4, 4, 1) == steps(4, 2, 2) == steps(2, 2, 4)


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="the stream ended before its first row"):
        next(iter(StreamSource([], list, batch_size=2)))


@pytest.mark.parametrize("count", [1, 4, 5, 13])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_batches_do_not_depend_on_the_ranks(count, world):
    wanted = [list(range(count))[first : first + 2] for first in range(0, count, 2)]
    for data in (list(range(count)), iter_of(count)):
        per_rank = [list(EvaluationSource(data, list, batch_size=2, rank=rank, world=world)) for rank in range(world)]
        assert len({len(batches) for batches in per_rank}) == 1
        found = [batch for turn in zip(*per_rank, strict=True) for batch in turn]
        assert [batch for batch in found if not isinstance(batch, Anchor)] == wanted


class iter_of:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_what_is_a_batch_source():
    assert is_batch_source(MapSource([1], list, batch_size=1))
    assert not is_batch_source(stream(3, "dataset"))
    assert not is_batch_source(datasets.Dataset.from_dict({"a": [1]}))
    assert not is_batch_source([1, 2])


def test_the_length_of_a_row():
    pair = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}
    judged = {"prompt_ids": None, "completion_ids": [4, 5], "label": True}
    assert completion_lengths(pair) == (3, 2, 1) and completion_lengths(judged) == (0, 2)
    assert completion_lengths({"chosen_ids": [4], "rejected_ids": []}) == (0, 1, 0)
    assert row_length("length", pair) == 6 and row_length("length", judged) == 2
    assert row_length("length", {**pair, "length": 9}) == 9
    assert row_length("length", {"input_ids": [1, 2], "chosen_ids": [3]}) == 2

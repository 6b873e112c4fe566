import array
import random
from typing import Any, cast

import pytest
import torch
from posttrain_collators import Padding, TokenBatch, TokenCollator, pack, pad_sequences
from torch._subclasses.fake_tensor import FakeTensorMode

PAD = 99


def collate(rows, size=None, **padding):
    return TokenCollator(Padding(PAD, **padding))(rows, size)


def test_padded_rows():
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, PAD, PAD]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, False, False]]
    assert batch.segment_ids.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert [t.dtype for t in batch] == [torch.int64, torch.bool, torch.int32, torch.int64]


def test_left_padding():
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], side="left", multiple_of=4)
    assert batch.input_ids.tolist() == [[PAD, 1, 2, 3], [PAD, PAD, 4, 5]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert batch.segment_ids.tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 1]]


def test_packed_rows():
    row = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [True] * 6, "seq_lengths": [3, 1, 2]}
    batch = collate([row], widths=(4, 8))
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 3, 3, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]]


def test_loss_mask_and_labels_say_the_same():
    ids = [7, 8, 9, 10]
    masked = collate([{"input_ids": ids, "loss_mask": [False, False, True, True], "labels": None}])
    labelled = collate([{"input_ids": ids, "labels": [-100, -100, 9, 10]}])
    assert masked.loss_mask.tolist() == [[False, False, True, True]]
    assert all(torch.equal(a, b) for a, b in zip(masked, labelled, strict=True))


def test_a_pad_id_that_is_also_a_real_token_is_trained():
    batch = collate([{"input_ids": [1, PAD]}, {"input_ids": [1, 2, PAD]}])
    assert batch.loss_mask.int().tolist() == [[0, 1, 0], [0, 1, 1]]


def test_filler_rows():
    batch = collate([{"input_ids": [1, 2]}], size=3)
    assert batch.input_ids.tolist() == [[1, 2], [PAD, PAD], [PAD, PAD]]
    assert batch.segment_ids.tolist() == [[1, 1], [1, 0], [1, 0]]  # attention always has something to attend to
    assert batch.loss_mask.sum(1).tolist() == [1, 0, 0]


def test_only_filler_rows_take_the_smallest_width():
    batch = collate([], size=2, widths=(4, 8))
    assert batch.input_ids.shape == (2, 4) and not batch.loss_mask.any()


def test_empty_row_is_a_filler_row():
    batch = collate([{"input_ids": []}, {"input_ids": [1, 2], "seq_lengths": None}])
    assert batch.segment_ids.tolist() == [[1, 0], [1, 1]]


def test_does_not_change_its_rows():
    row = {"input_ids": [1, 2], "loss_mask": [True, True]}
    collate([row])
    assert row == {"input_ids": [1, 2], "loss_mask": [True, True]}


def test_accepts_tensors_and_arrays():
    expected = collate([{"input_ids": [1, 2, 3], "loss_mask": [False, True, False]}])
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "loss_mask": torch.tensor([False, True, False])}]
    assert all(torch.equal(a, b) for a, b in zip(collate(rows), expected, strict=True))
    assert torch.equal(collate([{"input_ids": array.array("i", [1, 2, 3])}]).input_ids, expected.input_ids)


@pytest.mark.parametrize("side", ["right", "left"])
def test_packing_and_collating_keeps_every_target_but_first_tokens(side):
    rng = random.Random(0)
    rows = [[rng.randrange(1000) for _ in range(rng.randrange(1, 30))] for _ in range(50)]
    packed = [
        {"input_ids": [t for r, a, b in pieces for t in rows[r][a:b]], "seq_lengths": [b - a for _, a, b in pieces]}
        for pieces in pack([len(row) for row in rows], 32, overlong="truncate").bins
    ]
    batch = collate(packed, side=side, widths=(32,))
    alone = [collate([{"input_ids": row}], side=side) for row in rows]
    pairs = sorted(
        (int(token), int(position))
        for ids, mask, positions in zip(batch.input_ids, batch.loss_mask, batch.position_ids, strict=True)
        for token, target, position in zip(ids, mask, positions, strict=True)
        if target
    )
    expected = sorted(
        (int(token), int(position))
        for one in alone
        for token, target, position in zip(one.input_ids[0], one.loss_mask[0], one.position_ids[0], strict=True)
        if target
    )
    assert pairs == expected and len(pairs) == sum(len(row) - 1 for row in rows)


def test_shapes_do_not_depend_on_data():
    # Under fake tensors any shape that depends on a tensor's values raises.
    with FakeTensorMode():
        for rows in ([{"input_ids": [1, 2, 3]}], [{"input_ids": [1] * 8, "seq_lengths": [3, 5]}] * 2, []):
            batch = collate(rows, size=4, widths=(8,))
            assert all(tensor.shape == (4, 8) for tensor in batch)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"ids": [1]}, r"rows\[0\] has no input_ids; its keys are \['ids'\]"),
        ({"input_ids": [1, 2], "loss_mask": [True]}, "loss_mask has 1 values for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 values for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\]=2 is neither -100 nor the token 1"),
        ({"input_ids": [1, 2], "seq_lengths": [1]}, "add up to the 2 input_ids"),
        ({"input_ids": [1, 2], "seq_lengths": [2, 0]}, "must be positive"),
        ({"input_ids": [1] * 9}, "9 tokens is longer than the widest planned width, 8"),
    ],
)
def test_refuses_rows(row, match):
    with pytest.raises(ValueError, match=match):
        collate([row], widths=(8,))


def test_refuses_sizes():
    with pytest.raises(ValueError, match="rows is empty"):
        collate([])
    with pytest.raises(ValueError, match="size=1 is less than the 2 rows"):
        collate([{"input_ids": [1]}] * 2, size=1)


def test_width():
    assert [Padding(0).width(n) for n in (0, 1, 5)] == [1, 1, 5]
    assert [Padding(0, multiple_of=8).width(n) for n in (0, 8, 9)] == [8, 8, 16]
    assert [Padding(0, widths=(8, 32)).width(n) for n in (0, 8, 9, 32)] == [8, 8, 32, 32]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"pad_id": None}, "pad_id=None"),
        ({"side": "middle"}, "side='middle'"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"widths": ()}, r"widths=\(\)"),
        ({"widths": (8, 4)}, "ascending"),
        ({"widths": (8, 12), "multiple_of": 8}, "12 is not a multiple of multiple_of=8"),
    ],
)
def test_refuses_padding(arguments, match):
    everything: dict[str, Any] = {"pad_id": 0, **arguments}
    with pytest.raises(ValueError, match=match):
        Padding(**everything)


def test_pad_sequences():
    assert pad_sequences([[0.5], []], -1.0, 2, dtype=torch.float32).tolist() == [[0.5, -1.0], [-1.0, -1.0]]
    assert pad_sequences([], 0, 3).shape == (0, 3)
    with pytest.raises(ValueError, match="row 1 has 3 values, more than width=2"):
        pad_sequences([[1], [1, 2, 3]], 0, 2)
    with pytest.raises(ValueError, match="side='up'"):
        pad_sequences([[1]], 0, 2, side=cast(Any, "up"))


def test_is_a_named_tuple():
    batch = collate([{"input_ids": [1]}])
    assert isinstance(batch, TokenBatch) and TokenBatch(*batch) == batch

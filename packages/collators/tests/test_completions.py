import random
from itertools import combinations

import pytest
import torch
from posttrain_collators import (
    CompletionBatch,
    FeedbackCollator,
    FeedbackExtras,
    Padding,
    PairExtras,
    PreferenceCollator,
    pad_completions,
    plan_completion_shapes,
)
from torch._subclasses.fake_tensor import FakeTensorMode

PAD = 99
PAIR = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}


def test_pairs():
    batch = PreferenceCollator(PAD)([PAIR, {"prompt_ids": [7], "chosen_ids": [8], "rejected_ids": [9, 10, 11]}])
    assert batch.prompts.tolist() == [[1, 2, 3], [PAD, PAD, 7]]
    assert batch.prompt_mask.int().tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.completions.tolist() == [[[4, 5, PAD], [6, PAD, PAD]], [[8, PAD, PAD], [9, 10, 11]]]
    assert batch.completion_mask.int().tolist() == [[[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [1, 1, 1]]]
    assert [t.dtype for t in batch[:4]] == [torch.int64, torch.bool, torch.int64, torch.bool]
    assert batch.extras == PairExtras(None, None)
    assert isinstance(batch, CompletionBatch)


def test_a_pad_id_that_is_also_a_real_token_is_scored():
    batch = PreferenceCollator(PAD)([{"prompt_ids": [PAD, 1], "chosen_ids": [2, PAD], "rejected_ids": [PAD]}])
    assert batch.prompt_mask.tolist() == [[True, True]]
    assert batch.completion_mask.tolist() == [[[True, True], [True, False]]]


def test_the_side_of_a_padding_is_not_read():
    expected = PreferenceCollator(Padding(PAD, multiple_of=4))([PAIR])
    other = PreferenceCollator(Padding(PAD, "right", 4), Padding(PAD, "left", 4))([PAIR])
    assert all(torch.equal(a, b) for a, b in zip(expected[:4], other[:4], strict=True))


def test_widths_of_both_parts():
    batch = PreferenceCollator(Padding(PAD, widths=(2, 4)), Padding(PAD, widths=(3, 8)))([PAIR])
    assert batch.prompts.shape == (1, 4) and batch.completions.shape == (1, 2, 3)
    with pytest.raises(ValueError, match=r"rows\[1\], prompt: a row of 3 tokens is longer than the widest"):
        PreferenceCollator(Padding(PAD, widths=(2,)), Padding(PAD))([{**PAIR, "prompt_ids": [1]}, PAIR])
    with pytest.raises(ValueError, match=r"rows\[1\], completion: a row of 2 tokens"):
        PreferenceCollator(Padding(PAD), Padding(PAD, widths=(1,)))([{**PAIR, "chosen_ids": [1]}, PAIR])


def test_without_prompts():
    row = {"chosen_ids": [4, 5], "rejected_ids": [6]}
    for rows in ([row], [{"prompt_ids": None, **row}], [{"prompt_ids": [], **row}]):
        batch = PreferenceCollator(PAD)(rows)
        assert batch.prompts.shape == (1, 0) and batch.prompt_mask.shape == (1, 0)
        assert batch.completion_mask.sum().item() == 3
    planned = PreferenceCollator(Padding(PAD, widths=(4,)))([row])
    assert planned.prompts.shape == (1, 4) and not planned.prompt_mask.any()
    mixed = PreferenceCollator(PAD)([row, PAIR])
    assert mixed.prompt_mask.sum(-1).tolist() == [0, 3]


def test_filler_rows_have_something_to_attend_to_and_do_not_count():
    batch = PreferenceCollator(PAD)([PAIR], size=3)
    assert batch.prompt_mask.sum(-1).tolist() == [3, 1, 1]
    assert batch.prompts[1:].eq(PAD).all()
    assert batch.completion_mask.any(-1).all(-1).tolist() == [True, False, False]
    only = PreferenceCollator(Padding(PAD, widths=(4,)))([], size=2)
    assert only.prompts.shape == (2, 4) and only.completions.shape == (2, 2, 4)
    assert not only.completion_mask.any() and only.prompt_mask.sum().item() == 2


def test_an_empty_completion_does_not_count_and_leaves_something_to_attend_to():
    batch = PreferenceCollator(PAD)([{"chosen_ids": [], "rejected_ids": [6]}, {**PAIR, "rejected_ids": []}])
    assert batch.prompt_mask.sum(-1).tolist() == [1, 3]
    assert batch.completion_mask.any(-1).tolist() == [[False, True], [True, False]]


def test_margins_and_reference_logps():
    row = {**PAIR, "margin": 2, "chosen_reference_logps": [-1.0, -2.5], "rejected_reference_logps": [-0.5]}
    batch = PreferenceCollator(Padding(PAD, multiple_of=4))([row], size=2)
    assert batch.extras.margins.tolist() == [2.0, 0.0] and batch.extras.margins.dtype == torch.float32
    assert batch.extras.reference_logps.tolist() == [[[-1.0, -2.5, 0, 0], [-0.5, 0, 0, 0]], [[0] * 4] * 2]
    assert batch.extras.reference_logps.dtype == torch.float32
    none = PreferenceCollator(PAD)([{**PAIR, "margin": None, "chosen_reference_logps": None}])
    assert none.extras == PairExtras()


def test_feedback():
    rows = [
        {"prompt_ids": [1], "completion_ids": [2, 3], "label": True, "reference_logps": [-1.0, -2.0]},
        {"prompt_ids": [1, 4], "completion_ids": [5], "label": False, "reference_logps": [-3.0]},
    ]
    batch = FeedbackCollator(PAD)(rows, size=3)
    assert batch.completions.tolist() == [[[2, 3]], [[5, PAD]], [[PAD, PAD]]]
    assert batch.completion_mask.any(-1).all(-1).tolist() == [True, True, False]
    assert isinstance(batch.extras, FeedbackExtras)
    assert batch.extras.labels.tolist() == [True, False, False] and batch.extras.labels.dtype == torch.bool
    assert batch.extras.reference_logps.tolist() == [[[-1, -2]], [[-3, 0]], [[0, 0]]]
    assert FeedbackCollator(PAD)([{**rows[0], "reference_logps": None, "label": 1}]).extras.reference_logps is None


def test_groups_of_part():
    padding = Padding(PAD)
    batch = pad_completions([[1], [2, 3]], [[[4]], [[5], [], [6, 7]]], padding, padding, num_completions=3, size=3)
    assert batch.completions.shape == (3, 3, 2)
    assert batch.completion_mask.sum(-1).tolist() == [[1, 0, 0], [1, 0, 2], [0, 0, 0]]
    assert batch.extras is None
    with pytest.raises(ValueError, match=r"completions\[0\] has 2 entries, more than num_completions=1"):
        pad_completions([[1]], [[[1], [2]]], padding, padding, num_completions=1)


def test_accepts_tensors_and_does_not_change_its_rows():
    expected = PreferenceCollator(PAD)([PAIR])
    found = PreferenceCollator(PAD)([{name: torch.tensor(ids) for name, ids in PAIR.items()}])
    assert all(torch.equal(a, b) for a, b in zip(expected[:4], found[:4], strict=True))
    assert PAIR == {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}


def test_shapes_do_not_depend_on_data():
    # Under fake tensors any shape that depends on a tensor's values raises.
    collate = PreferenceCollator(Padding(PAD, widths=(8,)), Padding(PAD, widths=(4,)))
    with FakeTensorMode():
        for rows in ([PAIR], [{**PAIR, "margin": 1.0, "prompt_ids": []}] * 2, []):
            batch = collate(rows, size=4)
            assert batch.prompts.shape == batch.prompt_mask.shape == (4, 8)
            assert batch.completions.shape == batch.completion_mask.shape == (4, 2, 4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"chosen_ids": None}, r"rows\[1\] has no chosen_ids; its keys are \['chosen_ids', 'prompt_ids', 'rej"),
        ({"rejected_ids": None}, r"rows\[1\] has no rejected_ids"),
        ({"margin": 1.0}, r"rows\[0\] has no margin, but rows\[1\] has margin: give every row margin, or none"),
        ({"chosen_reference_logps": [-1.0, -1.0]}, r"rows\[0\] has no chosen_reference_logps, but rows\[1\]"),
    ],
)
def test_refuses_pairs(change, match):
    with pytest.raises(ValueError, match=match):
        PreferenceCollator(PAD)([PAIR, {**PAIR, **change}])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"margin": float("nan")}, r"rows\[0\]: margin=nan is not a finite number"),
        ({"margin": "big"}, r"rows\[0\]: margin='big' is not a finite number"),
        (
            {"chosen_reference_logps": [-1.0, -1.0]},
            r"rows\[0\] has no rejected_reference_logps, but rows\[0\] has chos",
        ),
        (
            {"chosen_reference_logps": [-1.0], "rejected_reference_logps": [-1.0]},
            r"rows\[0\]: chosen_reference_logps has 1 values for 2 completion tokens",
        ),
    ],
)
def test_refuses_extras(change, match):
    with pytest.raises(ValueError, match=match):
        PreferenceCollator(PAD)([{**PAIR, **change}])


def test_refuses_feedback_and_sizes():
    with pytest.raises(ValueError, match=r"rows\[0\] has no label"):
        FeedbackCollator(PAD)([{"completion_ids": [1]}])
    with pytest.raises(ValueError, match=r"rows\[0\]: label='yes' is neither True nor False"):
        FeedbackCollator(PAD)([{"completion_ids": [1], "label": "yes"}])
    with pytest.raises(ValueError, match="rows is empty"):
        FeedbackCollator(PAD)([])
    with pytest.raises(ValueError, match="size=1 is less than the 2 rows"):
        PreferenceCollator(PAD)([PAIR, PAIR], size=1)
    with pytest.raises(ValueError, match="pad_id=None"):
        PreferenceCollator(None)


def tokens(prompts, completions, plan):
    prompt_widths, widths = plan
    total = sum(min(w for w in prompt_widths if w >= max(1, n)) for n in prompts)
    return total + sum(len(row) * min(w for w in widths if w >= max(1, *row)) for row in completions)


def choices(lengths, number):
    top = max(1, *lengths)
    return [(*c, top) for k in range(min(number, top)) for c in combinations(range(1, top), k)]


@pytest.mark.parametrize("seed", range(30))
def test_plan_equals_brute_force(seed):
    rng = random.Random(seed)
    rows, each, most = rng.randrange(1, 7), rng.randrange(1, 4), rng.randrange(1, 6)
    prompts = [rng.randrange(0, 8) for _ in range(rows)]
    completions = [tuple(rng.randrange(0, 8) for _ in range(each)) for _ in range(rows)]
    plan = plan_completion_shapes(prompts, completions, most)
    assert len(plan[0]) * len(plan[1]) <= most
    longest = [max(row) for row in completions]
    best = min(
        tokens(prompts, completions, (first, second))
        for first in choices(prompts, most)
        for second in choices(longest, most // len(first))
        if len(first) * len(second) <= most
    )
    assert tokens(prompts, completions, plan) == best
    if each == 1:
        assert plan_completion_shapes(torch.tensor(prompts), torch.tensor(longest), most) == plan


def test_plan_takes_the_fewest_shapes_of_equal_plans():
    assert plan_completion_shapes([5, 5], [3, 3], 8, multiple_of=4) == ((8,), (4,))
    assert plan_completion_shapes([0], [(0, 0)], 2) == ((1,), (1,))
    assert plan_completion_shapes(iter([3, 9]), iter([[1, 2], [2, 2]]), 2, batch_size=2) == ((9,), (2,))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([], [], 1), "prompt_lengths is empty"),
        (([1], [1, 2], 1), "prompt_lengths has 1 rows and completion_lengths 2"),
        (([1], [(1, -2)], 1), r"completion_lengths\[0\]=\(1, -2\)"),
        (([-1], [1], 1), "prompt_lengths holds -1"),
        (([1], [1], 0), "max_shapes=0"),
    ],
)
def test_plan_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        plan_completion_shapes(*arguments)

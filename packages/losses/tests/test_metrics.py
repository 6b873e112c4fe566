import math
import statistics

import pytest
import torch
from posttrain_losses import Max, Mean, Min, Std

WHOLE = {Mean: statistics.fmean, Min: min, Max: max, Std: statistics.stdev}
KINDS = list(WHOLE)


def near(metric, expected):
    assert metric.compute() == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_parts_equal_the_whole_in_any_grouping(kind):
    values = torch.randn(100, dtype=torch.float64)
    a, b, c, d = (kind.of(x) for x in values.split([1, 40, 0, 59]))
    whole = WHOLE[kind](values.tolist())
    for merged in (a + b + c + d, a + (b + (c + d)), (d + b) + (c + a), kind.of(values)):
        near(merged, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_values_are_left_out_even_if_nan(kind):
    values = torch.tensor([[4.0, float("nan"), 1.0], [float("inf"), 2.0, 6.0]])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    near(kind.of(values, mask), WHOLE[kind]([4.0, 1.0, 2.0, 6.0]))
    near(kind.of(torch.arange(6.0).view(2, 3), torch.tensor([True, True, False])), WHOLE[kind]([0.0, 1.0, 3.0, 4.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_is_nan_and_neutral(kind):
    for empty in (kind.of(torch.empty(0)), kind.of(torch.ones(3), torch.zeros(3, dtype=torch.bool))):
        near(empty, float("nan"))
        near(empty + empty, float("nan"))
        for merged in (empty + kind.of(torch.tensor([1.0, 3.0])), kind.of(torch.tensor([1.0, 3.0])) + empty):
            near(merged, WHOLE[kind]([1.0, 3.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_values_show(kind):
    assert math.isnan((kind.of(torch.tensor([1.0, float("nan")])) + kind.of(2.0)).compute())


@pytest.mark.parametrize("kind", KINDS)
def test_state_round_trip(kind):
    metric = kind.of(torch.tensor([1.0, 4.0, 6.0], requires_grad=True))
    state = metric.state
    assert state.dim() == 1 and state.dtype == torch.float64 and not state.requires_grad
    again = kind.from_state(state.clone())
    near(again, metric.compute())
    near(again + kind.of(2.0), WHOLE[kind]([1.0, 4.0, 6.0, 2.0]))
    assert kind.of(5).state.shape == state.shape
    with pytest.raises(ValueError, match="state of"):
        kind.from_state(torch.zeros(7))


def test_adding_leaves_the_terms_alone():
    a, b = Mean.of(1.0), Mean.of(3.0)
    total = a + b
    near(total, 2.0)
    near(a, 1.0)
    near(b, 3.0)


def test_different_metrics_do_not_add():
    with pytest.raises(TypeError):
        Min.of(1.0) + Max.of(1.0)


def test_numbers_bools_integers_and_low_precision():
    near(Mean.of(True), 1.0)
    near(Mean.of(torch.tensor([True, False, False, False])), 0.25)
    near(Mean.of(torch.tensor([2**40 + 1, 2**40 + 3])), 2**40 + 2)
    near(Mean.of(torch.ones(5000, dtype=torch.bfloat16)), 1.0)
    near(Mean.ratio(torch.tensor(6.0, requires_grad=True), 4), 1.5)
    near(Mean.ratio(0.0, 0) + Mean.ratio(3.0, 2), 1.5)


def test_infinite_extremes_are_not_mistaken_for_nothing():
    assert Min.of(float("inf")).compute() == math.inf and Max.of(-math.inf).compute() == -math.inf


def test_std_keeps_a_small_spread_around_a_large_mean():
    values = 1e9 + torch.arange(10, dtype=torch.float64) * 1e-3
    merged = Std.of(values[:1]) + Std.of(values[1:4]) + Std.of(values[4:])
    assert merged.compute() == pytest.approx(statistics.stdev(range(10)) * 1e-3, rel=1e-4)
    near(Std.of(7.0), 0.0)


def test_repr_shows_value_and_count():
    assert repr(Mean.of(torch.tensor([1.0, 2.0]))) == "Mean(1.5, count=2)"

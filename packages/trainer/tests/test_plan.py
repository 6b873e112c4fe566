import logging
from typing import Any

import pytest
import torch
from posttrain_devices import device_spec
from posttrain_models import Layout
from posttrain_trainer import ShapePlan, resolve_completion_shapes, resolve_shapes
from posttrain_trainer.plan import ShapeWatch

CPU, NEURON = device_spec("cpu"), device_spec("neuron")
LENGTHS = [100] * 90 + [300] * 9 + [900]


def resolve(**settings):
    return resolve_shapes(**{"max_length": 1024, "batch_size": 4, "spec": CPU, **settings})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "shapes on cpu: rows, padded layout, the width of the longest row"),
        ({"layout": "packed"}, "shapes on cpu: rows, packed layout, no padding computed"),
        ({"pad_to_multiple_of": 64}, "shapes on cpu: rows, padded layout, widths in multiples of 64"),
        ({"max_shapes": 2, "lengths": [5, 6, 50]}, "shapes on cpu: rows, padded layout, widths 50"),
        ({"layout": "packed", "packing": True}, "shapes on cpu: packed rows, packed layout, no padding computed"),
        (
            {"layout": Layout("padded", "gated delta net")},
            "shapes on cpu: rows, padded layout (gated delta net), the width of the longest row",
        ),
        ({"spec": NEURON}, "shapes on neuron: rows, padded layout, widths 512, 1024 x 4 rows"),
        (
            {"spec": NEURON, "lengths": LENGTHS, "batch_size": 1},
            "shapes on neuron: rows, padded layout, widths 128, 1024 x 1 rows",
        ),
        ({"spec": NEURON, "packing": True}, "shapes on neuron: packed rows, padded layout, widths 1024 x 4 rows"),
        (
            {"spec": NEURON, "max_shapes": 3, "max_length": 700},
            "shapes on neuron: rows, padded layout, widths 256, 512, 768 x 4 rows",
        ),
    ],
)
def test_the_plan_in_one_line(settings, text):
    assert str(resolve(**settings)) == text


def test_limited_shapes_are_padded():
    plan = resolve(layout="packed", max_shapes=2, lengths=LENGTHS, batch_size=1)
    assert plan.layout == "padded" and plan.widths == (100, 900) and not plan.static
    assert plan.padding(0).width(101) == 900


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, "packing=True needs a layout that keeps the sequences of a row apart"),
        (
            {"packing": True, "layout": Layout("padded", "linear attention")},
            r"\(linear attention\): write packing=False",
        ),
        ({"padding_free": True}, "padding_free=True needs the 'packed' layout"),
        ({"padding_free": True, "spec": NEURON}, "neuron compiles each shape: write padding_free=False"),
        ({"max_shapes": 2, "pad_to_multiple_of": None}, "pad_to_multiple_of=None switches planning off"),
        ({"max_shapes": 2, "pad_to_multiple_of": "none"}, "pad_to_multiple_of=None switches planning off"),
        ({"max_shapes": 2, "padding_free": True, "layout": "packed"}, "leave one of the two out"),
        ({"max_shapes": 2, "packing": True, "layout": "packed"}, "packing=True computes no padding"),
        ({"max_shapes": 0}, "max_shapes=0"),
        ({"max_shapes": 2, "max_length": None}, "set max_length"),
        ({"spec": NEURON, "packing": True, "max_length": None}, "packing=True fills rows of max_length tokens"),
        ({"layout": "shared"}, "layout='shared'"),
        ({"pad_to_multiple_of": "some"}, "pad_to_multiple_of='some'"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve(**settings)


def test_planning_can_be_switched_off_with_a_warning_where_shapes_cost(caplog):
    with caplog.at_level(logging.WARNING):
        plan = resolve(spec=NEURON, pad_to_multiple_of=None)
    assert "on neuron each new one costs a compilation" in caplog.text
    assert plan.widths is None and not plan.static and plan.shapes == set()
    caplog.clear()
    resolve(pad_to_multiple_of=None)
    assert not caplog.text


def test_shapes_are_watched(caplog):
    plan = ShapePlan("neuron", "padded", False, 4, (4, 8), (2,), static=True)
    model = torch.nn.Embedding(8, 2)
    watch = ShapeWatch(plan).attach(model)
    for shape in ((2, 4), (2, 4), (2, 8)):
        model(torch.zeros(shape, dtype=torch.int64))
    assert watch.seen == {(2, 4): 2, (2, 8): 1} and watch.unplanned == set() and not caplog.text
    model(torch.zeros(1, 8, dtype=torch.int64))
    model(torch.zeros(1, 8, dtype=torch.int64))
    assert watch.unplanned == {(1, 8)} and caplog.text.count("(1, 8) is not in the plan") == 1
    strict = ShapeWatch(plan, strict=True).attach(torch.nn.Embedding(8, 2))
    with pytest.raises(RuntimeError, match="not in the plan"):
        strict._record(model, (torch.zeros(3, 3, dtype=torch.int64),), {})


PAIRS = [(100, 40, 50)] * 9 + [(900, 30, 90)]


def resolve_pairs(**settings):
    wanted: dict[str, Any] = {"max_length": 1024, "batch_size": 4, "num_completions": 2, "spec": CPU, **settings}
    return resolve_completion_shapes(**wanted)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {},
            "shapes on cpu: prompts with 2 completions, padded layout, the widths of the longest prompt and completion",
        ),
        (
            {"layout": "packed", "num_completions": 1},
            "shapes on cpu: prompts with 1 completion, packed layout, no padding computed",
        ),
        (
            {"layout": Layout("shared", "sdpa"), "padding_free": True},
            "shapes on cpu: prompts with 2 completions, shared layout (sdpa), no padding computed",
        ),
        (
            {"pad_to_multiple_of": 64},
            "shapes on cpu: prompts with 2 completions, padded layout, widths in multiples of 64",
        ),
        (
            {"max_shapes": 2, "lengths": iter(PAIRS), "layout": "shared", "batch_size": 1},
            "shapes on cpu: prompts with 2 completions, padded layout (max_shapes=2), widths 100, 900 + 90",
        ),
        (
            {"max_shapes": 1, "lengths": PAIRS, "max_length": 512, "max_completion_length": 64},
            "shapes on cpu: prompts with 2 completions, padded layout, widths 512 + 64",
        ),
        (
            {"spec": NEURON, "layout": "shared", "lengths": PAIRS, "batch_size": 1},
            "shapes on neuron: prompts with 2 completions, shared layout, widths 128, 1024 + 128 x 1 prompts",
        ),
        (
            {"spec": NEURON, "max_completion_length": 256},
            "shapes on neuron: prompts with 2 completions, padded layout, widths 512, 1024 + 256 x 4 prompts",
        ),
        (
            {"spec": NEURON, "max_completion_length": 2048, "max_shapes": 4},
            "shapes on neuron: prompts with 2 completions, padded layout, widths 1024 + 512, 1024, 1536, 2048 "
            "x 4 prompts",
        ),
    ],
)
def test_the_plan_of_prompts_with_completions_in_one_line(settings, text):
    assert str(resolve_pairs(**settings)) == text


def test_shapes_of_prompts_with_completions():
    padded = resolve_pairs(spec=NEURON, lengths=PAIRS, batch_size=1)
    assert padded.shapes == {(2, 256), (2, 1152)}
    shared = resolve_pairs(spec=NEURON, lengths=PAIRS, batch_size=1, layout="shared")
    assert shared.shapes == {(1, 384), (1, 1280)} and shared.static
    assert resolve_pairs(lengths=PAIRS, max_shapes=2).shapes == set()
    assert padded.prompt_padding(7).width(129) == 1024 and padded.prompt_padding(7).side == "left"
    assert padded.padding(7).width(100) == 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "split"}, "layout='split': write 'padded' or 'packed' or 'shared'"),
        ({"padding_free": True}, "padding_free=True needs the 'packed' or 'shared' layout"),
        ({"padding_free": True, "spec": NEURON}, "neuron compiles each shape: write padding_free=False$"),
        ({"max_shapes": 2, "pad_to_multiple_of": None}, "pad_to_multiple_of=None switches planning off"),
        ({"max_shapes": 2, "padding_free": True, "layout": "shared"}, "leave one of the two out"),
        ({"max_shapes": 0}, "max_shapes=0"),
        ({"max_shapes": 2, "max_length": None}, "set max_length"),
        ({"num_completions": 0}, "num_completions=0"),
    ],
)
def test_contradictions_of_completions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve_pairs(**settings)


def test_planning_of_completions_can_be_switched_off(caplog):
    with caplog.at_level(logging.WARNING):
        plan = resolve_pairs(spec=NEURON, pad_to_multiple_of=None, layout="shared")
    assert "on neuron each new one costs a compilation" in caplog.text
    assert plan.widths is plan.prompt_widths is None and not plan.static and plan.shapes == set()

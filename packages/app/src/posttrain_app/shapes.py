"""The layout and widths of a run: what its options ask, what its device asks, and what its model can do."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from posttrain_devices import device_spec
from posttrain_models import Layout, choose_layout
from posttrain_trainer import ShapePlan, resolve_completion_shapes, resolve_shapes
from posttrain_trainer.sources import completion_lengths
from torch import nn


def plan_rows(model: nn.Module, args: Any, *datasets: Any) -> ShapePlan:
    """The layout and widths of a run on rows of tokens, remembered on the model.

    Args:
        model: The model; its layout is probed.
        args: The method's config, with `packing`.
        datasets: Prepared rows, sets of them by name, or None; their lengths decide the widths.

    Raises:
        ValueError: Options contradict each other, or the model cannot do what they ask.
    """
    spec = device_spec(args.device)
    wanted = {None: "auto", True: "packed", False: "padded"}[args.padding_free]
    if args.packing and args.padding_free is False and not spec.static_shapes:
        raise ValueError("packing=True keeps rows apart by computing no padding: leave padding_free=False out.")
    if args.max_shapes is not None and args.padding_free is None and not args.packing:
        wanted = "padded"
    layout = _probed_layout(model, args, wanted)
    lengths = _lengths(datasets, lambda row: len(row["input_ids"]))
    return resolve_shapes(packing=args.packing, lengths=lengths, **_asked(args, layout))


def plan_completions(model: nn.Module, args: Any, num_completions: int, *datasets: Any) -> ShapePlan:
    """The layout and widths of a run on prompts with completions, remembered on the model.

    Args:
        model: The model; its layout is probed.
        args: The method's config.
        num_completions: Completions of a prompt, G.
        datasets: Prepared rows, sets of them by name, or None; their lengths decide the widths.

    Raises:
        ValueError: Options contradict each other, or the model cannot do what they ask.
    """
    padded = args.padding_free is False or (args.max_shapes is not None and args.padding_free is None)
    wanted = "padded" if padded and not device_spec(args.device).static_shapes else "auto"
    layout = _probed_layout(model, args, wanted, completions=True)
    lengths = _lengths(datasets, completion_lengths)
    return resolve_completion_shapes(num_completions=num_completions, lengths=lengths, **_asked(args, layout))


def _probed_layout(model: nn.Module, args: Any, wanted: str, **kind: bool) -> Layout:
    """Probed in the precision of training, which decides the attention kernel."""
    half = torch.bfloat16 if args.bf16 else torch.float16
    with torch.autocast(args.device.type, half, enabled=bool(args.bf16 or args.fp16)):
        return choose_layout(model, wanted, static_shapes=device_spec(args.device).static_shapes, **kind)


def _asked(args: Any, layout: Layout) -> dict[str, Any]:
    """What decides the shapes of rows of every kind."""
    return {
        "max_length": args.max_length,
        "batch_size": args.per_device_train_batch_size,
        "padding_free": bool(args.padding_free),
        "pad_to_multiple_of": args.pad_to_multiple_of,
        "max_shapes": args.max_shapes,
        "layout": layout,
        "spec": device_spec(args.device),
    }


def _lengths(datasets: tuple[Any, ...], of: Callable[[Any], Any]) -> Iterator[Any] | None:
    """Lengths of rows, read when they are needed; None where a stream has not told them."""
    sets = [rows for data in datasets for rows in (data.values() if isinstance(data, dict) else [data])]
    sets = [rows for rows in sets if rows is not None]
    if not all(hasattr(rows, "__len__") for rows in sets):
        return None
    return (of(row) for rows in sets for row in rows)

"""What a run will do, in lines for a person to read before it starts."""

import math
from typing import Any

import torch

GIB = 2**30


def describe_batches(args: Any, world_size: int, rows: int | None) -> str:
    """The batch equation, and how many optimiser steps it makes of the data.

    Args:
        args: The training arguments.
        world_size: Processes, one a device.
        rows: Prepared rows; None for a stream.

    Example:
        >>> from posttrain_trainer import TrainingConfig
        >>> from posttrain_app.describe import describe_batches
        >>> args = TrainingConfig("out", use_cpu=True, gradient_accumulation_steps=2)
        >>> print(describe_batches(args, world_size=4, rows=100))
        batch: 8 rows a device x 2 accumulated x 4 devices = 64 rows a step; 100 rows, 2 steps an epoch, 6 steps in all
    """
    each, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    total = each * accumulated * world_size
    line = f"batch: {each} rows a device x {accumulated} accumulated x {world_size} devices = {total} rows a step"
    if rows is None:
        return f"{line}; a stream, {args.max_steps} steps"
    epoch = rows // total if args.dataloader_drop_last else math.ceil(rows / total)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
    return f"{line}; {rows:,} rows, {epoch:,} steps an epoch, {steps:,} steps in all"


def describe_memory(parameters: int, trained: int, weight_bytes: int) -> str:
    """The memory that does not depend on batches: weights, gradients and AdamW's two moments of one replica.

    $$W b + T (g + 8), \\quad g = b$$

    for `W` parameters of `b` bytes, `T` of them trained, whose gradients take `b` bytes and whose moments 8.

    Args:
        parameters: All parameters.
        trained: Those that are trained.
        weight_bytes: Bytes of one weight.

    Example:
        >>> describe_memory(2**30, 2**30, 4)
        'memory: 4.0 GiB of weights + 4.0 of gradients + 8.0 of AdamW = 16.0 GiB, and activations on top'
    """
    weights, gradients, moments = (x / GIB for x in (parameters * weight_bytes, trained * weight_bytes, trained * 8))
    total = weights + gradients + moments
    return (
        f"memory: {weights:.1f} GiB of weights + {gradients:.1f} of gradients + {moments:.1f} of AdamW "
        f"= {total:.1f} GiB, and activations on top"
    )


def describe_run(report: Any, args: Any, world_size: int, rows: Any, shapes: Any, model: Any, weight_bytes: int) -> str:
    """What became of the rows, the batch equation, the shapes, and the memory: a line or more each.

    Args:
        report: What preparing the rows said; None where they are taken as they are.
        args: The training arguments.
        world_size: Processes, one a device.
        rows: Prepared rows, or a stream of them.
        shapes: The `ShapePlan`.
        model: The model with its adapter; its weights may be on the meta device.
        weight_bytes: Bytes of one weight.
    """
    parameters = [p.numel() for p in model.parameters()]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    batches = describe_batches(args, world_size, len(rows) if hasattr(rows, "__len__") else None)
    lines = [report, batches, shapes, describe_memory(sum(parameters), trained, weight_bytes)]
    return "\n".join(str(line) for line in lines if line is not None)


def mark_targets(tokenizer: Any, row: Any, limit: int = 600) -> str:
    """The text of a prepared row with its targets between guillemets.

    Args:
        tokenizer: Decodes.
        row: `input_ids` and `loss_mask`.
        limit: Characters to show.

    Example:
        >>> class Letters:
        ...     def decode(self, ids):
        ...         return "".join(chr(97 + i) for i in ids)
        >>> mark_targets(Letters(), {"input_ids": [0, 1, 2, 3], "loss_mask": [False, True, True, False]})
        'a«bc»d'
    """
    ids = row["input_ids"]
    mask = row["loss_mask"] if "loss_mask" in row else [False, *[True] * (len(ids) - 1)]
    parts, start = [], 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or mask[stop] != mask[start]:
            text = tokenizer.decode(ids[start:stop])
            parts.append(f"«{text}»" if mask[start] else text)
            start = stop
    return shortened("".join(parts), limit)


def shortened(text: str, limit: int = 600) -> str:
    """The beginning of a text that is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]} ..."


def dtype_bytes(name: str | None) -> int:
    """Bytes of a weight of a dtype named as for loading; those of bfloat16 for "auto"."""
    dtype = getattr(torch, str(name), torch.bfloat16)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 2

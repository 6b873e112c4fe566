"""Prompts with the completions of other rows, over all the rows of an optimiser step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from posttrain_app.methods import real
from posttrain_collators import CompletionBatch
from posttrain_trainer import Anchor
from posttrain_trainer.ranks import Ranks


class Row(NamedTuple):
    """Token ids of a row as bytes, which compare and travel well."""

    prompt: bytes
    completion: bytes


def mismatched(batches: Sequence[Any], ranks: Ranks) -> list[CompletionBatch]:
    """Each batch again, every row with the completion of another row of the step.

    In the order of the step, micro-batch m of rank r comes before that of rank r + 1, and all of them before
    micro-batch m + 1. Each row gets the completion of the nearest row before it whose prompt is another one, in a
    circle; none where all rows have one prompt. Filler rows, and the rows of an `Anchor`, neither give nor get one.

    Args:
        batches: This rank's micro-batches, with G=1.
        ranks: Those that share the step's rows.

    Returns:
        For each batch one of as many rows, as wide as one of the step's batches.
    """
    mine = [_rows(batch) for batch in batches]
    widths = [inner(batch).completions.shape[-1] for batch in batches]
    everyone = ranks.gather((mine, widths))
    known = sorted({width for _, found in everyone for width in found})
    order = [
        (rank, micro, place)
        for micro in range(len(batches))
        for rank, (rows, _) in enumerate(everyone)
        for place, row in enumerate(rows[micro])
        if row is not None
    ]
    step = [everyone[rank][0][micro][place] for rank, micro, place in order]
    others: list[list[bytes | None]] = [[None] * len(rows) for rows in mine]
    for (rank, micro, place), giver in zip(order, givers([row.prompt for row in step]), strict=True):
        if rank == ranks.index and giver is not None:
            others[micro][place] = step[giver].completion
    return [_batch(inner(batch), found, known) for batch, found in zip(batches, others, strict=True)]


def givers(prompts: Sequence[bytes]) -> list[int | None]:
    """For each row the nearest one before it, in a circle, with another prompt; None where there is none.

    Example:
        >>> givers([b"a", b"a", b"b", b"c"])
        [3, 3, 1, 2]
    """
    if len(set(prompts)) < 2:
        return [None] * len(prompts)
    found: list[int | None] = []
    for index, prompt in enumerate(prompts):
        at = index - 1
        while prompts[at] == prompt:
            at -= 1
        found.append(at % len(prompts))
    return found


def inner(batch: Any) -> CompletionBatch:
    """The batch that an `Anchor` runs, or the batch itself."""
    return batch.batch if isinstance(batch, Anchor) else batch


def _rows(batch: Any) -> list[Row | None]:
    rows = len(inner(batch).prompts)
    if isinstance(batch, Anchor):
        return [None] * rows
    tensors = (*batch[:4], real(batch))
    prompts, prompt_mask, completions, mask, there = (tensor.cpu() for tensor in tensors)

    def packed(ids: torch.Tensor) -> bytes:
        return ids.numpy().tobytes()

    return [
        Row(packed(prompts[i][prompt_mask[i]]), packed(completions[i, 0][mask[i, 0]])) if there[i] else None
        for i in range(rows)
    ]


def _batch(batch: CompletionBatch, others: Sequence[bytes | None], widths: Sequence[int]) -> CompletionBatch:
    empty = torch.zeros(0, dtype=torch.int64)
    ids = [torch.frombuffer(bytearray(other), dtype=torch.int64) if other else empty for other in others]
    longest = max(map(len, ids))
    width = next(width for width in widths if width >= longest)
    completions = torch.zeros(len(ids), 1, width, dtype=torch.int64)
    mask = torch.zeros(len(ids), 1, width, dtype=torch.bool)
    for row, one in enumerate(ids):
        completions[row, 0, : len(one)] = one
        mask[row, 0, : len(one)] = True
    device = batch.completions.device
    return CompletionBatch(batch.prompts, batch.prompt_mask, completions.to(device), mask.to(device))

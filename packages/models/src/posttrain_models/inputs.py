"""A batch as the arguments of a model call, and where its targets are in what comes back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from posttrain_collators import CompletionBatch, TokenBatch
from torch import Tensor

from posttrain_models.attention import packed_call
from posttrain_models.unwrap import input_device, text_config

# Layer types whose mask is a function of positions and boundaries alone.
MASKABLE = frozenset({"full_attention", "sliding_attention"})


@dataclass
class Plan:
    """One model call.

    Attributes:
        kwargs: Arguments of the model.
        targets: `(n,)` tokens to score.
        index: `(n,)` flattened positions whose hidden states predict them; None: position i predicts target i.
        positions: How many positions the model computes.
        places: `(n,)` where the scores belong in the flattened `(B, T)`; None where shapes are static.
        valid: `(B, T)` which tokens are targets.
        empty: No token is a target; `targets` then holds one stand-in that counts for nothing.
    """

    kwargs: dict[str, Any]
    targets: Tensor
    index: Tensor | None
    positions: int
    places: Tensor | None
    valid: Tensor
    empty: bool = False

    def context(self) -> AbstractContextManager[Any]:
        """What a model must be called in, with these `kwargs`."""
        queries = self.kwargs.get("cu_seq_lens_q")
        return nullcontext() if queries is None else packed_call(queries is not self.kwargs["cu_seq_lens_k"])

    def take(self, weights: Tensor) -> Tensor:
        """The `(n,)` weights of the targets, from `(B, T)`; 0 where nothing is a target."""
        weights = weights.to(self.valid.device)
        if self.places is None:
            return torch.where(self.valid, weights, torch.zeros_like(weights)).roll(-1, 1).reshape(-1)
        return weights.reshape(-1).index_select(0, self.places) * (0.0 if self.empty else 1.0)

    def spread(self, values: Tensor) -> Tensor:
        """The scores `(n,)` at their places in `(B, T)`; 0 elsewhere."""
        if self.places is None:
            # `where`, not a product: what a position without a target scored may be infinite.
            moved = values.reshape(self.valid.shape).roll(1, 1)
            return torch.where(self.valid, moved, torch.zeros_like(moved))
        if self.empty:
            values = values * 0
        flat = values.new_zeros(self.valid.numel())
        return flat.index_copy(0, self.places, values).view(self.valid.shape)


AnyPlan = TypeVar("AnyPlan", bound=Plan)


@dataclass
class CompletionPlan(Plan):
    """One model call for a `CompletionBatch`; what a `Plan` says of `(B, T)` holds for `(P, G, Tc)`.

    Attributes:
        last: `(P * G,)` flattened position of each completion's last token, of its prompt's where it is empty, and
            any position where both are.
    """

    last: Tensor = field(kw_only=True)

    def take(self, weights: Tensor) -> Tensor:
        """The `(n,)` weights of the targets, from `(P, G, Tc)`; 0 where nothing is a target."""
        if self.places is not None:
            return super().take(weights)
        weights = weights.to(self.valid.device)
        return torch.where(self.valid, weights, torch.zeros_like(weights)).reshape(-1)

    def spread(self, values: Tensor) -> Tensor:
        """The scores `(n,)` at their places in `(P, G, Tc)`; 0 elsewhere."""
        if self.places is not None:
            return super().spread(values)
        values = values.view(self.valid.shape)
        return torch.where(self.valid, values, torch.zeros_like(values))


def target_mask(batch: TokenBatch) -> Tensor:
    """Which tokens can be scored: marked as targets, and preceded by a token of their own sequence."""
    seg = batch.segment_ids
    same = torch.zeros_like(batch.loss_mask)
    same[:, 1:] = (seg[:, 1:] == seg[:, :-1]) & (seg[:, 1:] > 0)
    return batch.loss_mask & same


def build_plan(base: Any, batch: TokenBatch, layout: str, static_shapes: bool) -> Plan:
    """The call that scores `batch` under a layout, on the model's device."""
    if batch.input_ids.ndim != 2 or batch.input_ids.numel() == 0:
        raise ValueError(f"batch.input_ids must be a non-empty (B, T) tensor, not {tuple(batch.input_ids.shape)}")
    device = input_device(base) if batch.input_ids.device.type == "cpu" else batch.input_ids.device
    if static_shapes:
        return _static_plan(base, TokenBatch(*(x.to(device) for x in batch)))
    if layout != "padded":
        return _packed_plan(batch, device)
    if bool((batch.segment_ids > 1).any()):
        return _split_plan(batch, device)
    return _padded_plan(batch, device)


def _anchor(plan: AnyPlan) -> AnyPlan:
    # Every rank must run backward through every parameter, so a batch without targets scores one token for nothing.
    if plan.targets.numel() or plan.places is None:
        return plan
    zero = torch.zeros(1, dtype=torch.long, device=plan.targets.device)
    return replace(plan, targets=zero, index=zero, places=zero, empty=True)


def _padded_plan(batch: TokenBatch, device: torch.device) -> Plan:
    valid = target_mask(batch)
    places = valid.reshape(-1).nonzero().squeeze(1)
    targets = batch.input_ids.reshape(-1)[places]
    kwargs = {
        "input_ids": batch.input_ids.to(device),
        "attention_mask": (batch.segment_ids > 0).to(device, torch.long),
        "position_ids": batch.position_ids.to(device),
        "use_cache": False,
    }
    places = places.to(device)
    return _anchor(Plan(kwargs, targets.to(device), places - 1, batch.input_ids.numel(), places, valid.to(device)))


@dataclass
class _Flat:
    """The real tokens of a batch, one sequence after the other."""

    ids: Tensor
    position_ids: Tensor
    bounds: Tensor
    targets: Tensor
    index: Tensor
    places: Tensor
    valid: Tensor


def _flatten(batch: TokenBatch) -> _Flat:
    seg = batch.segment_ids.reshape(-1)
    real = (seg > 0).nonzero().squeeze(1)
    if not len(real):
        raise ValueError("batch has no token: every segment_id is 0")
    seg, row = seg[real], real // batch.segment_ids.shape[1]
    first = torch.ones_like(real, dtype=torch.bool)
    first[1:] = (seg[1:] != seg[:-1]) | (row[1:] != row[:-1])
    bounds = torch.cat([first.nonzero().squeeze(1), real.new_tensor([len(real)])])
    valid = target_mask(batch)
    at = valid.reshape(-1)[real].nonzero().squeeze(1)
    ids = batch.input_ids.reshape(-1)[real]
    return _Flat(ids, batch.position_ids.reshape(-1)[real], bounds, ids[at], at - 1, real[at], valid)


def _packed_plan(batch: TokenBatch, device: torch.device) -> Plan:
    flat = _flatten(batch)
    lengths = flat.bounds.diff().tolist()
    kwargs = _one_row(flat.ids, flat.position_ids, lengths, lengths, device)
    places = (flat.targets.to(device), flat.index.to(device), len(flat.ids), flat.places.to(device))
    return _anchor(Plan(kwargs, *places, flat.valid.to(device)))


def _one_row(
    ids: Tensor, position_ids: Tensor, lengths: list[int], key_lengths: list[int], device: torch.device
) -> dict[str, Any]:
    """A call with every token in one row.

    Its segments have `lengths`; one that has more keys than tokens also sees so many of the first tokens of the
    nearest segment before it that has not.
    """
    queries = _bounds(lengths, device)
    keys = queries if key_lengths == lengths else _bounds(key_lengths, device)
    return {
        "input_ids": ids[None].to(device),
        "position_ids": position_ids[None].to(device),
        "attention_mask": None,
        "cu_seq_lens_q": queries,
        "cu_seq_lens_k": keys,
        "max_length_q": max(lengths),
        "max_length_k": max(key_lengths),
        "use_cache": False,
    }


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    # Kept beside the tensor so that no attention layer asks the device for them.
    bounds.lengths = lengths  # ty: ignore[missing-attribute]
    return bounds


def _split_plan(batch: TokenBatch, device: torch.device) -> Plan:
    """One row per sequence: exact for every architecture, at the price of padding."""
    flat = _flatten(batch)
    lengths = flat.bounds.diff()
    rows, width = len(lengths), int(lengths.max())
    slot = torch.arange(len(flat.ids), device=flat.ids.device)
    slot = slot + (torch.arange(rows, device=slot.device) * width - flat.bounds[:-1]).repeat_interleave(lengths)

    def place(values: Tensor) -> Tensor:
        return values.new_zeros(rows * width).index_copy(0, slot, values).view(rows, width).to(device)

    kwargs = {
        "input_ids": place(flat.ids),
        "attention_mask": place(torch.ones_like(flat.ids)),
        "position_ids": place(flat.position_ids),
        "use_cache": False,
    }
    index = slot.index_select(0, flat.index).to(device)
    return _anchor(
        Plan(kwargs, flat.targets.to(device), index, rows * width, flat.places.to(device), flat.valid.to(device))
    )


def _static_plan(base: Any, batch: TokenBatch) -> Plan:
    """Every position is computed and projected; nothing here depends on the data for its shape."""
    config = text_config(base)
    types = layer_types(config)
    kwargs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    why = only_padding(config, types)
    if why is None:
        kwargs["attention_mask"] = _block_masks(base, config, types, batch.segment_ids)
    else:
        seg = batch.segment_ids
        if not _is_fake(seg) and bool((seg > 1).any()):
            raise ValueError(f"batch holds packed rows, but on static shapes {why}; use packing=False")
        kwargs["attention_mask"] = (seg > 0).long()
    targets = batch.input_ids.roll(-1, 1).reshape(-1)
    return Plan(kwargs, targets, None, batch.input_ids.numel(), None, target_mask(batch))


def build_completion_plan(base: Any, batch: CompletionBatch, layout: str, static_shapes: bool) -> CompletionPlan:
    """The call that scores the completions of `batch` under a layout, on the model's device.

    `padded` has one row per completion, its prompt in front; `packed` the tokens of those rows without padding;
    `shared` every prompt once, followed by its completions: with static shapes those of its own row, otherwise those of
    all rows with an equal prompt.
    """
    _check(batch)
    device = input_device(base) if batch.completions.device.type == "cpu" else batch.completions.device
    shared = layout == "shared"
    if static_shapes:
        tensors = [x.to(device) for x in batch[:4]]
        grid = _grid(*tensors, shared=shared)
        return _static_completions(base, grid, tensors[2], shared)
    grid = _grid(*batch[:4], shared=shared)
    # The completion tokens that are scored: (n,) places in (P, G, Tc), and the cells that predict them.
    places = grid.valid.reshape(-1).nonzero().squeeze(1)
    index, last = grid.before.reshape(-1)[places], grid.last
    if layout == "padded":
        positions = grid.ids.numel()
        kwargs = {
            "input_ids": grid.ids.to(device),
            "attention_mask": (grid.segments > 0).to(device, torch.long),
            "position_ids": grid.position_ids.to(device),
            "use_cache": False,
        }
    else:
        cells, slots, (lengths, keys) = grid.pack(_first_equal(batch) if shared else None)
        positions = len(cells)
        if not positions:
            raise ValueError("batch has no token: every mask is False")
        ids, position_ids = grid.ids.reshape(-1)[cells], grid.position_ids.reshape(-1)[cells]
        kwargs = _one_row(ids, position_ids, lengths, keys, device)
        index, last = slots[index], slots[last]
    targets = batch.completions.reshape(-1)[places]
    index, last, places = index.to(device), last.to(device), places.to(device)
    plan = CompletionPlan(kwargs, targets.to(device), index, positions, places, grid.valid.to(device), last=last)
    return _anchor(plan)


def _first_equal(batch: CompletionBatch) -> Tensor:
    """For each row `(P,)` the first one that has its prompt."""
    prompts = torch.where(batch.prompt_mask, batch.prompts, -1)
    rows = torch.arange(len(prompts), device=prompts.device)
    if not prompts.numel():
        return rows
    same = prompts.unique(dim=0, return_inverse=True)[1]
    return torch.zeros_like(rows).scatter_reduce(0, same, rows, "amin", include_self=False)[same]


def _check(batch: CompletionBatch) -> None:
    prompts, completions = batch.prompts, batch.completions
    if completions.ndim != 3 or completions.numel() == 0:
        raise ValueError(f"batch.completions must be a non-empty (P, G, Tc) tensor, not {tuple(completions.shape)}")
    if prompts.ndim != 2 or len(prompts) != len(completions):
        raise ValueError(
            f"batch.prompts must be (P, Tp) with P={len(completions)} as batch.completions, not {tuple(prompts.shape)}"
        )
    for name, mask, of in (
        ("prompt_mask", batch.prompt_mask, prompts),
        ("completion_mask", batch.completion_mask, completions),
    ):
        if mask.shape != of.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"batch.{name} must be a bool tensor of shape {tuple(of.shape)}, not {mask.dtype} {tuple(mask.shape)}"
            )
    # On a device the question would wait for it.
    if completions.device.type != "cpu" or _is_fake(completions):
        return
    if bool((batch.prompt_mask[:, :-1] & ~batch.prompt_mask[:, 1:]).any()):
        raise ValueError("batch.prompts must be padded on the left: a False follows a True in prompt_mask")
    if bool((~batch.completion_mask[..., :-1] & batch.completion_mask[..., 1:]).any()):
        raise ValueError("batch.completions must be padded on the right: a True follows a False in completion_mask")


@dataclass
class _Grid:
    """Prompts and completions as R rows of W cells.

    A row is a prompt and one completion, or a prompt and all of its completions (shared).
    """

    ids: Tensor  # (R, W)
    segments: Tensor  # (R, W): 0 is padding; shared: 1 the prompt, 2, 3, ... its completions; 1 otherwise
    position_ids: Tensor  # (R, W)
    before: Tensor  # (P, G, Tc): the cell that predicts each token of a completion
    last: Tensor  # (P * G,): the cell of a completion's last token
    valid: Tensor  # (P, G, Tc)
    prompt_width: int  # Tp
    prompt_lengths: Tensor  # (P,)
    completion_lengths: Tensor  # (P, G)

    def pack(self, first: Tensor | None) -> tuple[Tensor, Tensor, tuple[list[int], list[int]]]:
        """The cells that hold a token in the order of one row, where each cell went, and the row's segments.

        Given the `first (R,)` row with the prompt of each, in a shared grid, rows of one prompt follow the first of
        them and find the prompt there. Of each segment that has tokens there are its number and that of the keys that
        its last token sees.
        """
        R, W = self.ids.shape
        real, rows = self.segments > 0, torch.arange(R, device=self.ids.device)
        prompts, completions = self.prompt_lengths[:, None], self.completion_lengths
        if first is None:
            order = rows
            own = keys = prompts + completions
        else:
            order, repeated = first.argsort(stable=True), first != rows
            own, keys = torch.cat([prompts, completions], 1), torch.cat([prompts, prompts + completions], 1)
            own[repeated, 0] = 0
            own, keys = own[order], keys[order]
            real = real.clone()
            real[repeated, : self.prompt_width] = False
        cells = (order[:, None] * W + torch.arange(W, device=order.device))[real[order]]
        slots = torch.zeros_like(self.ids).view(-1).index_copy(0, cells, torch.arange(len(cells), device=cells.device))
        if first is not None:
            slots = slots.view(R, W)
            slots[:, : self.prompt_width] = slots[first, : self.prompt_width]
        return cells, slots.view(-1), (own[own > 0].tolist(), keys[own > 0].tolist())


def _grid(prompts: Tensor, prompt_mask: Tensor, completions: Tensor, mask: Tensor, *, shared: bool) -> _Grid:
    (P, G, Tc), Tp = completions.shape, prompts.shape[1]
    prompt_lengths, lengths = prompt_mask.sum(1), mask.sum(2)
    # Positions stay at the last token's where padding follows it, so that none exceeds what the model has.
    at_prompt = (prompt_mask.cumsum(1) - 1).clamp(min=0)
    at = (prompt_lengths[:, None, None] + mask.cumsum(2) - 1).clamp(min=0)
    number = torch.arange(P * G, device=prompts.device).view(P, G)
    if shared:
        W = Tp + G * Tc
        segment = mask * torch.arange(2, G + 2, device=mask.device)[:, None]
        pairs = ((prompts, completions), (prompt_mask.long(), segment), (at_prompt, at))
        ids, segments, position_ids = (torch.cat([x, y.flatten(1)], 1) for x, y in pairs)
        start = number // G * W  # (P, G): the first cell of the row
        first = start + Tp + number % G * Tc  # (P, G): the first cell of the completion
    else:
        W = Tp + Tc
        pairs = ((prompts, completions), (prompt_mask, mask), (at_prompt, at))
        ids, segments, position_ids = (torch.cat([x[:, None].expand(P, G, Tp), y], 2).view(P * G, W) for x, y in pairs)
        start = number * W
        first = start + Tp
    # A prompt ends where its row's completions begin; without one, the cell is a stand-in.
    end = (start + Tp - 1).clamp(min=0)
    steps = torch.arange(Tc, device=mask.device)
    before = torch.cat([end[..., None], first[..., None] + steps[:-1]], 2)
    last = torch.where(lengths > 0, first + lengths - 1, end).reshape(-1)
    valid = mask & ((prompt_lengths > 0)[:, None, None] | (steps > 0))
    return _Grid(ids, segments, position_ids, before, last, valid, Tp, prompt_lengths, lengths)


def _static_completions(base: Any, grid: _Grid, completions: Tensor, shared: bool) -> CompletionPlan:
    """Every completion position is scored; nothing here depends on the data for its shape."""
    config = text_config(base)
    types = layer_types(config)
    if only_padding(config, types) is None:
        mask = _block_masks(base, config, types, grid.segments.long(), grid.position_ids if shared else None)
    else:
        mask = grid.segments.long()
    kwargs = {"input_ids": grid.ids, "attention_mask": mask, "position_ids": grid.position_ids, "use_cache": False}
    targets = completions.reshape(-1)
    return CompletionPlan(kwargs, targets, grid.before.reshape(-1), grid.ids.numel(), None, grid.valid, last=grid.last)


def only_padding(config: Any, types: set[str]) -> str | None:
    """Why a model can be given a 2D mask of padding alone; None where it takes a block mask."""
    if not types <= MASKABLE:
        return f"layers of type {', '.join(sorted(types - MASKABLE))} would mix their sequences"
    if getattr(config, "output_router_logits", False):
        return "the router's balance loss can only leave padding out (output_router_logits=False lifts this)"
    return None


def layer_types(config: Any) -> set[str]:
    """The kinds of token mixing that a text configuration names."""
    named = getattr(config, "layer_types", None)
    if named is not None:
        return set(named)
    if getattr(config, "attention_chunk_size", None) is not None:
        return {"chunked_attention"}
    return {"sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"}


def _block_masks(
    base: Any, config: Any, types: set[str], segment_ids: Tensor, at: Tensor | None = None
) -> Tensor | dict[str, Tensor]:
    # As `generate` hands masks to a model with a static cache: one mask per layer type where the configuration names
    # types, one for all layers otherwise.
    masks = {kind: _block_mask(base, config, kind, segment_ids, at) for kind in sorted(types)}
    return masks if getattr(config, "layer_types", None) is not None else next(iter(masks.values()))


def _block_mask(base: Any, config: Any, kind: str, segment_ids: Tensor, at: Tensor | None) -> Tensor:
    """Each segment by itself, in the order of the columns.

    Given positions `at (R, W)`, in their order, and segment 1 of a row is seen by all its other segments.
    """
    # Padding is a segment of its own, so that no row of the mask is empty.
    allowed = segment_ids[:, :, None] == segment_ids[:, None, :]
    if at is None:
        at = torch.arange(segment_ids.shape[1], device=segment_ids.device)[None]
    else:
        allowed = allowed | ((segment_ids[:, :, None] > 0) & (segment_ids[:, None, :] == 1))
    gap = at[:, :, None] - at[:, None, :]
    allowed = allowed & (gap >= 0)
    if kind == "sliding_attention":
        allowed = allowed & (gap < config.sliding_window)
    mask = allowed[:, None]
    if config._attn_implementation == "eager":
        dtype = base.get_input_embeddings().weight.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)

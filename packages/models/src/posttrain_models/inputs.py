"""A `TokenBatch` as the arguments of a model call, and where its targets are in what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from posttrain_collators import TokenBatch
from torch import Tensor

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
    if layout == "packed":
        return _packed_plan(batch, device)
    if bool((batch.segment_ids > 1).any()):
        return _split_plan(batch, device)
    return _padded_plan(batch, device)


def _anchor(plan: Plan) -> Plan:
    # Every rank must run backward through every parameter, so a batch without targets scores one token for nothing.
    if plan.targets.numel() or plan.places is None:
        return plan
    zero = torch.zeros(1, dtype=torch.long, device=plan.targets.device)
    return Plan(plan.kwargs, zero, zero, plan.positions, zero, plan.valid, empty=True)


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
    bounds = flat.bounds.to(device, torch.int32)
    # Kept beside the tensor so that no attention layer asks the device for them.
    bounds.lengths = lengths  # ty: ignore[missing-attribute]
    longest = max(lengths)
    kwargs = {
        "input_ids": flat.ids[None].to(device),
        "position_ids": flat.position_ids[None].to(device),
        "attention_mask": None,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }
    places = (flat.targets.to(device), flat.index.to(device), len(flat.ids), flat.places.to(device))
    return _anchor(Plan(kwargs, *places, flat.valid.to(device)))


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


def _block_masks(base: Any, config: Any, types: set[str], segment_ids: Tensor) -> Tensor | dict[str, Tensor]:
    # As `generate` hands masks to a model with a static cache: one mask per layer type where the configuration names
    # types, one for all layers otherwise.
    masks = {kind: _block_mask(base, config, kind, segment_ids) for kind in sorted(types)}
    return masks if getattr(config, "layer_types", None) is not None else next(iter(masks.values()))


def _block_mask(base: Any, config: Any, kind: str, segment_ids: Tensor) -> Tensor:
    at = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    allowed = at[:, None] >= at[None, :]
    if kind == "sliding_attention":
        allowed = allowed & (at[:, None] - at[None, :] < config.sliding_window)
    # Padding is a sequence of its own, so that no row of the mask is empty.
    mask = (allowed[None] & (segment_ids[:, :, None] == segment_ids[:, None, :]))[:, None]
    if config._attn_implementation == "eager":
        dtype = base.get_input_embeddings().weight.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)

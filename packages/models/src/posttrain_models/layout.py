"""Which layout a model runs in: structure from an allow-list, then two rows that must score the same."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from posttrain_collators import TokenBatch
from torch import Tensor, nn

from posttrain_models import attention
from posttrain_models.inputs import MASKABLE, build_plan, layer_types, only_padding
from posttrain_models.sketch import cut_copy
from posttrain_models.unwrap import base_model, quiet, state_of, text_config

logger = logging.getLogger("posttrain")


class Layout(NamedTuple):
    """How batches are laid out for a model.

    Attributes:
        name: `"padded"` or `"packed"`.
        reason: Why, in one line; for a person to read.
        static_shapes: Every call has the shape of its batch, and nothing depends on the data for its shape.
    """

    name: str
    reason: str
    static_shapes: bool = False


def choose_layout(model: nn.Module, requested: str = "auto", *, static_shapes: bool = False) -> Layout:
    """Decide whether a model runs packed (no padding token is computed) or padded, and remember it on the model.

    Packed needs attention that honours sequence boundaries. The layer types must be on an allow-list (full and sliding
    attention), and two short rows must score the same packed and padded; what fails runs padded. Packing sets the
    attention implementation to this package's, unless FlashAttention or a kernel from the hub was asked for: those
    read boundaries themselves.

    Args:
        model: The model, wrapped or not.
        requested: `"auto"`, `"padded"` or `"packed"`.
        static_shapes: The device compiles one program per shape: always padded, and packed rows are kept apart by a
            mask of fixed shape.

    Returns:
        The layout with its reason.

    Raises:
        ValueError: `requested="packed"` and the model or device cannot run packed, with the reason.

    Example:
        >>> from posttrain_models import choose_layout, tiny_model
        >>> choose_layout(tiny_model("llama")).name
        'packed'
        >>> choose_layout(tiny_model("qwen3_5")).name
        'padded'
    """
    if requested not in ("auto", "padded", "packed"):
        raise ValueError(f"requested={requested!r} is not a layout; write 'auto', 'padded' or 'packed'")
    base = base_model(model)
    if requested == "padded":
        layout = Layout("padded", "as requested", static_shapes)
    elif static_shapes:
        layout = Layout("padded", "shapes are static on this device", True)
    else:
        obstacle = _obstacle(base) or _try_packed(model, base)
        layout = Layout("padded", obstacle) if obstacle else Layout("packed", _how(base))
    if requested == "packed" and layout.name != "packed":
        raise ValueError(f"layout 'packed' is not possible: {layout.reason}; use 'auto' or 'padded'")
    if static_shapes:
        _check_block_mask(base)
    state_of(base).layout = layout
    return layout


def _how(base: Any) -> str:
    name = text_config(base)._attn_implementation
    return "SDPA within each sequence" if name == attention.NAME else f"{name} reads the boundaries"


def honours_boundaries(implementation: str | None) -> bool:
    """Whether an attention implementation of transformers reads `cu_seq_lens_q` itself."""
    name = implementation or ""
    return name.startswith("flash_attention") or "/" in name


def _obstacle(base: Any) -> str | None:
    """What in the structure of the model rules packing out."""
    config = text_config(base)
    odd = layer_types(config) - MASKABLE
    if odd:
        return f"{', '.join(sorted(odd))} layers carry state across sequence boundaries"
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    if any(isinstance(module, nn.Conv1d) for module in decoder.modules()):
        return "convolutions mix neighbouring tokens across sequence boundaries"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "attention is not causal"
    can_set = getattr(type(base), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        return f"{type(base).__name__} does not use transformers' attention interface"
    if base.get_output_embeddings() is None:
        return f"{type(base).__name__} has no LM head to probe"
    if next(base.parameters()).device.type == "meta":
        return "the weights are not loaded yet, so packing could not be probed"
    return None


def _try_packed(model: nn.Module, base: Any) -> str | None:
    """Switch to boundary-aware attention and compare; None when packing is safe, the reason otherwise."""
    config = text_config(base)
    before = config._attn_implementation
    obstacle = None
    try:
        with quiet(model, base) as precision:
            padded, size = _row_logps(model, base, "padded")
            if not honours_boundaries(before):
                base.set_attn_implementation(attention.NAME)
            packed, _ = _row_logps(model, base, "packed")
        obstacle = _calls_missing(config) or _differs(padded, packed, precision.tolerance(size))
    except Exception as error:  # whatever a model raises here means that it cannot run packed
        obstacle = f"the packed probe failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if obstacle and config._attn_implementation != before:
        base.set_attn_implementation(before)
    return obstacle


def _calls_missing(config: Any) -> str | None:
    if config._attn_implementation != attention.NAME:
        return None
    layers = config.num_hidden_layers
    if attention.PACKED.calls != layers:
        return f"{attention.PACKED.calls} of {layers} layers used the registered attention"
    named = getattr(config, "layer_types", None) or [*layer_types(config)] * layers
    windowed = sum(kind == "sliding_attention" for kind in named)
    if attention.PACKED.windowed < windowed:
        return f"{windowed} layers have a sliding window but {attention.PACKED.windowed} pass it to attention"
    return None


def probe_batch(base: Any, packed_rows: bool = False) -> TokenBatch:
    """Two short sequences of unequal length, as two rows or packed in one."""
    vocab = text_config(base).vocab_size
    lengths = (5, 9)
    # Low token ids only: the placeholders of images and the like are at the end of a vocabulary.
    ids = [1 + (torch.arange(n) * 7 + 3 * n) % max(1, min(vocab - 1, 97)) for n in lengths]
    width = sum(lengths) if packed_rows else max(lengths)
    rows = [torch.zeros(1 if packed_rows else 2, width, dtype=torch.long) for _ in range(3)]
    for number, sequence in enumerate(ids):
        row, start = (0, lengths[0] * number) if packed_rows else (number, 0)
        where = slice(start, start + len(sequence))
        rows[0][row, where] = sequence
        rows[1][row, where] = number + 1 if packed_rows else 1
        rows[2][row, where] = torch.arange(len(sequence))
    mask = (rows[1] > 0) & (rows[2] > 0)
    return TokenBatch(rows[0], mask, rows[1].int(), rows[2])


def _row_logps(
    model: nn.Module, base: Any, layout: str, static_shapes: bool = False, packed_rows: bool = False
) -> tuple[Tensor, float]:
    """Log-probabilities `(n,)` of the probe's targets from plain logits, and the largest logit."""
    plan = build_plan(base, probe_batch(base, packed_rows), layout, static_shapes)
    if layout == "packed":
        with attention.packed_call():
            logits = model(**plan.kwargs).logits
    else:
        logits = model(**plan.kwargs).logits
    logits = logits.reshape(-1, logits.shape[-1]).float()
    index = torch.arange(plan.positions, device=logits.device) if plan.index is None else plan.index
    logps = logits[index].log_softmax(-1).gather(1, plan.targets[:, None]).squeeze(1)
    return plan.spread(logps)[plan.valid].cpu(), float(logits.abs().max())


def _differs(one: Tensor, other: Tensor, allowed: float) -> str | None:
    gap = float((one - other).abs().mean())
    if gap <= allowed:
        return None
    return f"two rows score differently than when padded, by {gap:.2g} nats (allowed {allowed:.2g})"


def _check_block_mask(base: Any) -> None:
    """Packed rows under the mask of fixed shape equal separate rows: on the CPU, where a probe costs no compilation."""
    config = text_config(base)
    if only_padding(config, layer_types(config)) or base.get_output_embeddings() is None:
        return
    if next(base.parameters()).device.type != "cpu":
        base = cut_copy(base)
    with quiet(base, base) as precision:
        apart, size = _row_logps(base, base, "padded", static_shapes=True)
        together, _ = _row_logps(base, base, "padded", static_shapes=True, packed_rows=True)
    wrong = _differs(apart, together, precision.tolerance(size))
    if wrong:
        raise ValueError(f"{type(base).__name__} does not keep packed rows apart on static shapes: {wrong}")

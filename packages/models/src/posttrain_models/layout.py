"""Which layout a model runs in: structure from an allow-list, then two rows that must score the same."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from posttrain_collators import CompletionBatch, TokenBatch
from torch import Tensor, nn

from posttrain_models import attention
from posttrain_models.inputs import MASKABLE, Plan, build_completion_plan, build_plan, layer_types, only_padding
from posttrain_models.norm import fuse_norms
from posttrain_models.rotary import fuse_rotary
from posttrain_models.sketch import cut_copy
from posttrain_models.unwrap import base_model, keep_softcap, output_head, quiet, state_of, text_config

logger = logging.getLogger("posttrain")


class Layout(NamedTuple):
    """How batches are laid out for a model.

    Attributes:
        name: `"padded"`, `"packed"` or `"shared"`.
        reason: Why, in one line; for a person to read.
        static_shapes: Every call has the shape of its batch, and nothing depends on the data for its shape.
    """

    name: str
    reason: str
    static_shapes: bool = False


def choose_layout(
    model: nn.Module, requested: str = "auto", *, static_shapes: bool = False, completions: bool = False
) -> Layout:
    """Decide how a model's batches are laid out, and remember it on the model.

    `packed` computes no padding token, and `shared` moreover computes a prompt once for all of its completions;
    batches that have none run packed under it. `padded` does neither. The numbers are the same to round-off.

    Packed needs attention that honours sequence boundaries. The layer types must be on an allow-list (full and sliding
    attention), and two short rows must score the same packed and padded; what fails runs padded. Packing sets the
    attention implementation to this package's, unless FlashAttention or a kernel from the hub was asked for: those
    read boundaries themselves. They do not read which prompt is whose, so that they rule sharing out.

    On the CPU the model's RMSNorms and its architecture's rotary embeddings are from then on computed in fewer passes,
    equal to round-off. A forward whose backward is still to come must not have run before, where checkpointing would
    recompute it with them.

    Args:
        model: The model, wrapped or not: a causal language model, or a sequence classifier with a head named `score`.
        requested: `"auto"`, `"padded"`, `"packed"` or `"shared"`.
        static_shapes: The device compiles one program per shape: never packed, and what must not see each other is
            kept apart by a mask of fixed shape.
        completions: `"auto"` is to prefer `shared`, which is for batches of prompts with completions.

    Returns:
        The layout with its reason.

    Raises:
        ValueError: The model or device cannot run the layout that was requested by name, with the reason.

    Example:
        >>> from posttrain_models import choose_layout, tiny_model
        >>> choose_layout(tiny_model("llama")).name
        'packed'
        >>> choose_layout(tiny_model("llama"), completions=True).name
        'shared'
        >>> choose_layout(tiny_model("qwen3_5")).name
        'padded'
    """
    if requested not in ("auto", "padded", "packed", "shared"):
        raise ValueError(f"requested={requested!r} is not a layout; write 'auto', 'padded', 'packed' or 'shared'")
    base = base_model(model)
    keep_softcap(base)
    sharing = requested == "shared" or (requested == "auto" and completions)
    if requested == "padded":
        layout = Layout("padded", "as requested", static_shapes)
    elif static_shapes:
        layout = _fixed(base, sharing)
    else:
        layout = _flexible(model, base, sharing)
    if requested in ("packed", "shared") and layout.name != requested:
        raise ValueError(f"layout {requested!r} is not possible: {layout.reason}; use 'auto' or {layout.name!r}")
    if static_shapes:
        _check_block_mask(base)
    fuse_norms(base)
    fuse_rotary(base)
    state_of(base).layout = layout
    return layout


def _flexible(model: nn.Module, base: Any, sharing: bool) -> Layout:
    obstacle = _obstacle(base) or _try(model, base, "packed")
    if obstacle:
        return Layout("padded", obstacle)
    if not sharing:
        return Layout("packed", _how(base))
    obstacle = _unshared(base) or _try(model, base, "shared")
    if obstacle:
        return Layout("packed", f"{_how(base)}, prompts are not shared: {obstacle}")
    return Layout("shared", f"{_how(base)} and its prompt")


def _fixed(base: Any, sharing: bool) -> Layout:
    static = "shapes are static on this device"
    if not sharing:
        return Layout("padded", static, True)
    obstacle = only_padding(text_config(base), layer_types(text_config(base)))
    if obstacle is None:
        copy = _on_cpu(base)
        with quiet(copy, copy) as precision:
            padded, size = _probe(copy, copy, build_completion_plan(copy, probe_completions(copy), "padded", True))
            shared, _ = _probe(copy, copy, build_completion_plan(copy, probe_completions(copy), "shared", True))
        obstacle = _differs(padded, shared, precision.tolerance(size))
    if obstacle:
        return Layout("padded", f"{static}, and prompts are not shared: {obstacle}", True)
    return Layout("shared", f"{static}: a mask of fixed shape tells whose a prompt is", True)


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
    if output_head(base) is None:
        return f"{type(base).__name__} has no LM head to probe"
    if next(base.parameters()).device.type == "meta":
        return "the weights are not loaded yet, so packing could not be probed"
    return None


def _unshared(base: Any) -> str | None:
    """What in the structure of a model that runs packed rules out that completions share a prompt."""
    config = text_config(base)
    if config._attn_implementation != attention.NAME:
        return f"{config._attn_implementation} does not read which prompt a completion belongs to"
    if getattr(config, "output_router_logits", False):
        return "the router's balance loss would count a prompt once (output_router_logits=False lifts this)"
    return None


def _try(model: nn.Module, base: Any, layout: str) -> str | None:
    """Switch to boundary-aware attention and compare; None when the layout is safe, the reason otherwise."""
    config = text_config(base)
    before = config._attn_implementation
    obstacle = None
    try:
        with quiet(model, base) as precision:
            padded, size = _probe(model, base, _probe_plan(base, layout, "padded"))
            if not honours_boundaries(before):
                base.set_attn_implementation(attention.NAME)
            packed, _ = _probe(model, base, _probe_plan(base, layout, layout))
        obstacle = _calls_missing(config) or _differs(padded, packed, precision.tolerance(size))
    except Exception as error:  # whatever a model raises here means that it cannot run packed
        obstacle = f"the {layout} probe failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
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


def probe_completions(base: Any) -> CompletionBatch:
    """Two prompts of unequal length with two completions each."""
    lengths = torch.tensor([[3, 4, 6], [5, 2, 1]])
    ids = 1 + (torch.arange(2 * 17).view(2, 17) * 7) % max(1, min(text_config(base).vocab_size - 1, 97))
    steps = torch.arange(6)
    prompt_mask = steps[1:] > 5 - lengths[:, :1]
    return CompletionBatch(ids[:, :5], prompt_mask, ids[:, 5:].view(2, 2, 6), steps < lengths[:, 1:, None])


def _probe_plan(base: Any, candidate: str, layout: str) -> Plan:
    """The call that tells whether a candidate differs from padded, in one of the two layouts."""
    if candidate == "shared":
        return build_completion_plan(base, probe_completions(base), layout, False)
    return build_plan(base, probe_batch(base), layout, False)


def _probe(model: nn.Module, base: Any, plan: Plan) -> tuple[Tensor, float]:
    """Log-probabilities `(n,)` of the probe's targets from plain logits, and the largest logit.

    Of a sequence classifier, its scores at the same positions.
    """
    classifies = base.get_output_embeddings() is None
    with plan.context():
        # A classifier's own forward would pick one position of every row.
        logits = base.score(base.base_model(**plan.kwargs)[0]) if classifies else model(**plan.kwargs).logits
    logits = logits.reshape(-1, logits.shape[-1]).float()
    index = torch.arange(plan.positions, device=logits.device) if plan.index is None else plan.index
    at = logits[index]
    scores = at.sum(-1) if classifies else at.log_softmax(-1).gather(1, plan.targets[:, None]).squeeze(1)
    return plan.spread(scores)[plan.valid].cpu(), float(logits.abs().max())


def _differs(one: Tensor, other: Tensor, allowed: float) -> str | None:
    gap = float((one - other).abs().mean())
    if gap <= allowed:
        return None
    return f"two rows score differently than when padded, by {gap:.2g} nats (allowed {allowed:.2g})"


def _check_block_mask(base: Any) -> None:
    """Packed rows under the mask of fixed shape equal separate rows: on the CPU, where a probe costs no compilation."""
    config = text_config(base)
    if only_padding(config, layer_types(config)) or output_head(base) is None:
        return
    base = _on_cpu(base)
    with quiet(base, base) as precision:
        apart, size = _probe(base, base, build_plan(base, probe_batch(base), "padded", True))
        together, _ = _probe(base, base, build_plan(base, probe_batch(base, True), "padded", True))
    wrong = _differs(apart, together, precision.tolerance(size))
    if wrong:
        raise ValueError(f"{type(base).__name__} does not keep packed rows apart on static shapes: {wrong}")


def _on_cpu(base: Any) -> Any:
    return base if next(base.parameters()).device.type == "cpu" else cut_copy(base)

"""The model behind the wrappers, and what is remembered about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The model without `torch.compile`, DDP, FSDP1 and DeepSpeed wrappers; a `PeftModel` stays one.

    Args:
        model: Any module. FSDP2 shards in place and leaves nothing to remove.

    Returns:
        The innermost `PreTrainedModel` or `PeftModel`.

    Example:
        >>> import torch
        >>> from posttrain_models import tiny_model, unwrap
        >>> model = tiny_model("llama", vocab_size=16)
        >>> unwrap(torch.compile(model)) is model
        True
    """
    while not hasattr(model, "config") or "_orig_mod" in model._modules or "module" in model._modules:
        inner = getattr(model, "_orig_mod", None)
        inner = getattr(model, "module", None) if inner is None else inner
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def base_model(model: nn.Module) -> Any:
    """The `PreTrainedModel` itself: wrappers removed, adapters injected but their container removed."""
    inner = unwrap(model)
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        return inner.get_base_model()
    return inner


def text_config(base: Any) -> Any:
    """The configuration of the language model, of a vision-language checkpoint too."""
    config = base.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def output_head(base: Any) -> nn.Module | None:
    """The layer that turns hidden states into logits, or into the scores of a sequence classifier."""
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return getattr(base, "score", None) if head is None else head


@dataclass
class State:
    """What is known about one model; kept on the unwrapped model, so that every wrapper sees it."""

    layout: Any = None
    head: Any = None


def state_of(base: nn.Module) -> State:
    """The remembered facts of a model, made empty at first use."""
    if not isinstance(getattr(base, "_posttrain", None), State):
        base._posttrain = State()
    return base._posttrain


@dataclass
class Precision:
    """The coarsest data type that a probe saw at the LM head."""

    eps: float = 0.0

    def tolerance(self, largest: float) -> float:
        """How far two computations of one log-probability may lie apart when the largest logit is `largest`."""
        return 1e-4 + 2 * self.eps * max(largest, 1.0)


@contextmanager
def quiet(model: nn.Module, base: Any) -> Iterator[Precision]:
    """Evaluation mode without gradients or compilation, for a probe; every module's mode is put back.

    Yields the precision at which the model computes, autocast included, which only shows from inside.
    """
    modes = {module: module.training for module in model.modules()}
    seen = Precision()

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        kind = inputs[0].device.type
        dtypes = [inputs[0].dtype]
        if torch.is_autocast_enabled(kind):
            dtypes.append(torch.get_autocast_dtype(kind))
        seen.eps = max(seen.eps, *(torch.finfo(dtype).eps for dtype in dtypes))

    hook = output_head(base).register_forward_pre_hook(look)
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training


def keep_softcap(base: Any) -> None:
    """Switch a model whose attention scores are soft-capped from SDPA, which drops the cap, to transformers' own.

    Transformers before 5.24 loads Gemma 2 with SDPA.
    """
    config = text_config(base)
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        base.set_attn_implementation("eager")


def input_device(base: Any) -> torch.device:
    """Where the token ids must be."""
    return base.get_input_embeddings().weight.device

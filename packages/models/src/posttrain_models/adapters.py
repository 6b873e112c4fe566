"""Adapters through peft, with what they reach and what they do not."""

from __future__ import annotations

import logging
from typing import Any

import torch
from posttrain_devices import device_spec, supports_bf16
from torch import nn

from posttrain_models.loading import require_peft
from posttrain_models.options import LoraOptions
from posttrain_models.unwrap import base_model

logger = logging.getLogger("posttrain")


def apply_lora(model: nn.Module, options: Any, *, gradient_checkpointing: bool = False) -> Any:
    """Add a trainable adapter to a model and say what it reaches.

    Args:
        model: A `PreTrainedModel`, quantised or not.
        options: `LoraOptions`, or a configuration of peft. The head of a sequence classifier, as reward models are,
            trains in full beside an adapter of `LoraOptions`, whose task is SEQ_CLS then.
        gradient_checkpointing: Whether training will checkpoint activations: the input embeddings' output then requires
            a gradient, without which frozen first layers would cut the graph.

    Returns:
        A `PeftModel`. Weights of the adapter are float32, or bfloat16 over a quantised model on a device that has it.

    Raises:
        ValueError: The model has an adapter already, or the options name nothing in it.

    Example:
        >>> from posttrain_models import LoraOptions, apply_lora, tiny_model
        >>> model = apply_lora(tiny_model("llama"), LoraOptions(use_peft=True, lora_r=4))
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        896
    """
    peft = require_peft("use_peft=True asks for an adapter")
    if hasattr(model, "peft_config"):
        raise ValueError(
            "the model has an adapter already, which is continued as it is: leave out use_peft and peft_config, or "
            "merge the adapter first (model.merge_and_unload())"
        )
    config = _lora_config(peft, model, options) if isinstance(options, LoraOptions) else options
    if not isinstance(config, peft.PeftConfig):
        raise ValueError(f"options must be LoraOptions or a PeftConfig, not {type(options).__name__}")
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(f"{type(config).__name__} adds virtual tokens to the input, which cannot be scored; use LoRA")
    quantised = getattr(model, "is_quantized", False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"the adapter does not fit {type(model).__name__}: {error}") from error
    _refuse_tied(adapted)
    if gradient_checkpointing:
        adapted.enable_input_require_grads()
    if quantised and supports_bf16(device_spec(next(model.parameters()).device)):
        for name, parameter in adapted.named_parameters():
            # The magnitudes of DoRA are kept precise: they multiply the frozen weights.
            if parameter.requires_grad and "lora_magnitude" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    logger.info(describe_adapter(adapted))
    return adapted


def _lora_config(peft: Any, model: nn.Module, options: LoraOptions) -> Any:
    saved = list(options.lora_modules_to_save) if options.lora_modules_to_save else None
    task = options.lora_task_type
    if _classifies(model):  # its head is new or specific to the task, so that it trains in full and is saved
        saved = [*(saved or []), *({"score"} - set(saved or []))]
        task = "SEQ_CLS" if task == LoraOptions.lora_task_type else task
    try:
        return peft.LoraConfig(
            r=options.lora_r,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=_targets(peft, model, options),
            target_parameters=options.lora_target_parameters,
            modules_to_save=saved,
            task_type=task,
            use_rslora=options.use_rslora,
            use_dora=options.use_dora,
            bias="none",
            # Embeddings and head that are one tensor stay one when either is trained in full.
            ensure_weight_tying=bool(options.lora_modules_to_save)
            and bool(getattr(model.config, "tie_word_embeddings", False)),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"the LoRA options are not valid: {error}") from error


def _classifies(model: nn.Module) -> bool:
    """Whether the model is a sequence classifier, as reward models are."""
    return model.get_output_embeddings() is None and isinstance(getattr(model, "score", None), nn.Module)


def _targets(peft: Any, model: nn.Module, options: LoraOptions) -> Any:
    """The layers to adapt: as asked, else those customary for the architecture that it has, else all linear ones."""
    if options.lora_target_modules == ["all-linear"]:
        return "all-linear"
    if options.lora_target_modules is not None:
        return list(options.lora_target_modules)
    if options.lora_target_parameters is not None:
        return []
    customary = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type, ())
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return sorted(present.intersection(customary)) or "all-linear"


def _refuse_tied(model: nn.Module) -> None:
    """An adapter on one of two modules that share a weight cannot be merged: the other would change with it."""
    base = base_model(model)
    for part, name in ((base.get_input_embeddings(), "input embeddings"), (base.get_output_embeddings(), "LM head")):
        if hasattr(part, "base_layer") and getattr(base.config, "tie_word_embeddings", False):
            raise ValueError(
                f"lora_target_modules puts an adapter on the {name}, whose weight is shared with another module, so it "
                "could not be merged; train it in full instead (lora_modules_to_save)"
            )


def describe_adapter(model: nn.Module) -> str:
    """One line: the share of parameters that trains, and fused weights that the adapter does not reach."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    line = f"adapter: {trained:,} of {total:,} parameters train ({100 * trained / max(total, 1):.3g}%)"
    fused = _fused_out_of_reach(base_model(model))
    if not fused:
        return line
    share = 100 * sum(fused.values()) / total
    names = ", ".join(sorted(fused))
    return (
        f"{line}; {share:.3g}% are fused weights that LoRA on linear layers does not reach ({names}): name them in "
        "lora_target_parameters to adapt them"
    )


def _fused_out_of_reach(base: Any) -> dict[str, int]:
    """Fused expert weights (three or more dimensions) without an adapter: their last two names, and elements."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    found: dict[str, int] = {}
    for name, parameter in decoder.named_parameters():
        # peft keeps the original of an adapted parameter under the adapter's wrapper.
        if parameter.ndim < 3 or "conv" in name or ".base_layer." in f".{name}" or "lora_" in name:
            continue
        short = ".".join(name.split(".")[-2:])
        found[short] = found.get(short, 0) + parameter.numel()
    return found

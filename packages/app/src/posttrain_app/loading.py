"""From what a trainer is given to a tokenizer and a model that are ready to train."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain_data import clone_chat_template
from posttrain_models import (
    LoadOptions,
    LoraOptions,
    apply_lora,
    complete_tokenizer,
    load_model,
    load_tokenizer,
    sketch_model,
)
from posttrain_models.loading import adapter_config, base_of
from posttrain_trainer.checks import check_objects
from posttrain_trainer.config import checkpointing
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging as transformers_logging

from posttrain_app.config import TemplateConfig

logger = logging.getLogger("posttrain")


def load_options(model: Any, args: Any) -> LoadOptions | None:
    """How to load `model`; None when it is a model already.

    Raises:
        ValueError: The model is neither a name, nor `LoadOptions` that give one, nor a module.

    Example:
        >>> from posttrain_app import MethodConfig
        >>> from posttrain_app.loading import load_options
        >>> load_options("Qwen/Qwen3-0.6B", MethodConfig("out", use_cpu=True)).model_name_or_path
        'Qwen/Qwen3-0.6B'
    """
    if isinstance(model, nn.Module):
        if args.model_init_kwargs:
            raise ValueError("model_init_kwargs are for a model given by name; this one is loaded already.")
        return None
    if isinstance(model, LoadOptions):
        if not model.model_name_or_path:
            raise ValueError("model_name_or_path is missing: name the model to train, a folder or a name on the hub.")
        return model
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model must be a name, a path, LoadOptions or a model; got {type(model).__name__}.")
    return LoadOptions(model_name_or_path=os.fspath(model), trust_remote_code=args.trust_remote_code)


def resolve_tokenizer(model: Any, args: Any, processing_class: Any = None) -> tuple[Any, list[int]]:
    """The tokenizer (or processor) to prepare rows with, from what was passed or from beside the model.

    Args:
        model: As the trainer was given it.
        args: The method's config; a `TemplateConfig` may name a chat template and an end token.
        processing_class: A tokenizer or processor; None loads the model's.

    Returns:
        The tokenizer, and the ids of the tokens that its new chat template brought along.

    Raises:
        ValueError: It cannot be found, or lacks a padding and an end token.
    """
    if processing_class is None:
        options = load_options(model, args)
        extra = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        name = options.model_name_or_path if options else getattr(model.config, "_name_or_path", "")
        if not name:
            raise ValueError("processing_class is missing, and the model does not say where it came from: pass one.")
        processing_class = load_tokenizer(
            _tokenizer_source(name),
            revision=extra.get("revision", options.model_revision if options else "main"),
            trust_remote_code=options.trust_remote_code if options else args.trust_remote_code,
        )
    check_objects(processing_class, None)
    tokenizer = inner_tokenizer(processing_class)
    changes = args if isinstance(args, TemplateConfig) else None
    complete_tokenizer(tokenizer, eos_token=changes and changes.eos_token)
    if changes is None or changes.chat_template_path is None:
        return processing_class, []
    return processing_class, clone_chat_template(None, tokenizer, changes.chat_template_path)


def inner_tokenizer(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def resolve_model(
    model: Any,
    args: Any,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    quantization_config: Any = None,
    peft_config: Any = None,
    fit: Callable[[nn.Module], Any] | None = None,
    load: Callable[..., Any] = load_model,
) -> nn.Module:
    """The model to train: loaded where it should be, with its adapter.

    Args:
        model: A name, a path, `LoadOptions`, or a model.
        args: The method's config.
        model_init_kwargs: Further arguments of `from_pretrained`.
        quantization_config: A quantisation configuration of transformers.
        peft_config: A configuration of peft, or `LoraOptions`; None adds no adapter.
        fit: Called with the loaded model before it gets its adapter, to make room for tokens.
        load: `posttrain_models.load_model`, or another one with its arguments.

    Raises:
        ValueError: The model cannot be loaded, or has an adapter and would get another.
    """
    options = load_options(model, args)
    source = model if options is None else options.model_name_or_path
    if isinstance(peft_config, LoraOptions) and not peft_config.use_peft and peft_config != LoraOptions():
        logger.warning("options of an adapter have no effect without use_peft=True: no new adapter is made")
    set_seed(args.seed)  # before an adapter or a new head draws its weights
    with _progress_bars(not args.disable_tqdm):
        loaded = load(
            source,
            options,
            model_init_kwargs=model_init_kwargs,
            quantization_config=quantization_config,
            **({"device": None} if args.use_cpu else {}),
        )
    if fit is not None:
        fit(loaded)
    if adapts(peft_config):
        return apply_lora(loaded, peft_config, gradient_checkpointing=checkpointing(args))
    if checkpointing(args) and hasattr(loaded, "peft_config"):
        loaded.enable_input_require_grads()
    return loaded


def adapts(peft_config: Any) -> bool:
    """Whether a new adapter is asked for."""
    return peft_config is not None and not (isinstance(peft_config, LoraOptions) and not peft_config.use_peft)


def check_adapter(options: LoadOptions | None, peft_config: Any) -> None:
    """Refuse a new adapter on the folder of one.

    Raises:
        ValueError: The model that `options` name is an adapter, or a folder that is not there.
    """
    if options is not None and adapter_config(options.model_name_or_path) and adapts(peft_config):
        raise ValueError(
            f"{options.model_name_or_path} is an adapter, which is continued as it is: leave out use_peft and "
            "peft_config, or name its base model to begin another one."
        )


def saved_adapter(options: LoadOptions) -> Any:
    """The configuration with which the adapter that `options` name is continued; None for a whole model."""
    if adapter_config(options.model_name_or_path) is None:
        return None
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(options.model_name_or_path)
    config.inference_mode = False
    return config


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Whether transformers shows how far it is, within the block."""
    before = transformers_logging.is_progress_bar_enabled()
    if not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()


def cut_of(model: Any, args: Any) -> nn.Module | None:
    """A cut of a model given by name, without its weights, to try on it what not every model can do.

    None for a model that is loaded already, and where the attention was chosen by name: kernels of an accelerator
    cannot be tried on a cut on the CPU.
    """
    options = load_options(model, args)
    if options is None or options.attn_implementation or (args.model_init_kwargs or {}).get("attn_implementation"):
        return None
    return sketch_model(options)[1]


def disable_dropout(model: nn.Module) -> None:
    """Take dropout out of a model, its adapters included.

    Example:
        >>> from torch import nn
        >>> from posttrain_app.loading import disable_dropout
        >>> model = nn.Sequential(nn.Dropout(0.1))
        >>> disable_dropout(model)
        >>> model[0].p
        0.0
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention drops out inside its kernel, at a rate that the layer holds as a number.
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _tokenizer_source(name: str) -> str:
    """The model's own name; for the folder of an adapter that was saved without a tokenizer, its base model's."""
    adapter = adapter_config(name)
    if adapter is None or (Path(name) / "tokenizer_config.json").is_file():
        return name
    return base_of(name, adapter)

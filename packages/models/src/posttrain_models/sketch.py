"""A model's structure without its weights: for plans that must be quick and small."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from posttrain_models.loading import adapter_config, base_of, freeze_towers, model_class
from posttrain_models.options import LoadOptions


def sketch_model(options: LoadOptions) -> tuple[nn.Module, nn.Module]:
    """The model that options name, without weights: whole on the meta device, and cut short on the CPU.

    The cut has random weights, a layer of each kind that the model has, and few token ids: its layout can be
    probed in a moment.

    Args:
        options: Which model; for the folder of an adapter, its base model.

    Returns:
        The whole model on the meta device, frozen where loading would freeze it, and the cut one.

    Raises:
        ValueError: There is no such model, or its configuration cannot be read.

    Example:
        >>> import tempfile
        >>> from posttrain_models import LoadOptions, sketch_model, tiny_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tiny_model("llama", num_hidden_layers=3).save_pretrained(folder)
        ...     whole, cut = sketch_model(LoadOptions(folder))
        >>> whole.device.type, whole.config.num_hidden_layers, cut.config.num_hidden_layers
        ('meta', 3, 1)
    """
    name = str(options.model_name_or_path)
    adapter = adapter_config(name)
    if adapter is not None:
        name = base_of(name, adapter)
    try:
        config = AutoConfig.from_pretrained(
            name, revision=options.model_revision, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"the configuration of model {name} cannot be read: {error}") from None
    loader = model_class(config)
    with torch.device("meta"):
        whole = _build(loader, copy.deepcopy(config))
    freeze_towers(whole)
    return whole, _build(loader, _cut(config)).float()


def cut_copy(base: Any) -> nn.Module:
    """A random model of the same class and settings on the CPU, with one layer of each kind and few token ids."""
    return _build(type(base), _cut(copy.deepcopy(base.config))).float().eval()


def _build(loader: Any, config: Any) -> nn.Module:
    return loader.from_config(config) if hasattr(loader, "from_config") else loader._from_config(config)


def _cut(config: Any) -> Any:
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    layers = 1
    if types:
        layers = max(types.index(kind) for kind in set(types)) + 1
        text.layer_types = types[:layers]
    text.num_hidden_layers = layers
    text.vocab_size = 256
    for item in {id(part): part for part in (config, text)}.values():
        for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(item, token, None)
    return config

"""The weights of a checkpoint against the model that is to receive them."""

from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import PreTrainedModel

from posttrain_trainer.checkpoint import damaged, read_json

# What changes the meaning or the shape of weights; names and dtypes may differ between a run and its resumption.
CONFIG_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
ADAPTER_KEYS = ("peft_type", "r", "lora_alpha", "use_dora", "use_rslora")


def saved_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (file, shape) of every tensor in a folder's safetensors files, from their headers alone.

    Raises:
        ValueError: Naming folder and file, if a header cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
    else:
        names = [name for name in ("model.safetensors", "adapter_model.safetensors") if (folder / name).exists()]
    found = {}
    for name in names:
        try:
            with safetensors.safe_open(str(folder / name), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    found[key] = (name, tuple(file.get_slice(key).get_shape()))
        except (OSError, safetensors.SafetensorError) as error:
            raise damaged(folder, name, f"cannot be read ({error})") from error
    return found


def expected_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name to shape of the tensors that a checkpoint of this model holds."""
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(model)
    else:
        state = model.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_weights(model: torch.nn.Module, folder: Path) -> None:
    """Checks that a checkpoint is of this model, before any weight of it is overwritten.

    Raises:
        ValueError: Naming the folder, the file, and what differs.
    """
    if hasattr(model, "peft_config"):
        _check_config(folder, "adapter_config.json", _adapter_config(model), ADAPTER_KEYS)
    elif isinstance(model, PreTrainedModel):
        _check_config(folder, "config.json", model.config.to_dict(), CONFIG_KEYS)
    saved = saved_shapes(folder)
    if not saved:
        if (folder / "pytorch_model.bin").exists() or (folder / "adapter_model.bin").exists():
            return
        raise damaged(folder, "model.safetensors", "is missing")
    expected = expected_shapes(model)
    for name, (file, shape) in saved.items():
        if name in expected and expected[name] != shape:
            raise _other_model(folder, file, f"{name} has shape {list(shape)}, this model has {list(expected[name])}")
    if not isinstance(model, PreTrainedModel) and set(saved) != set(expected):
        name = sorted(set(saved) ^ set(expected))[0]
        file = next(iter(saved.values()))[0]
        raise _other_model(folder, file, f"tensor {name} is only in the {'file' if name in saved else 'model'}")


def _adapter_config(model: Any) -> dict[str, Any]:
    return model.peft_config[model.active_adapters[0]].to_dict()


def _check_config(folder: Path, name: str, mine: dict[str, Any], keys: tuple[str, ...]) -> None:
    saved = read_json(folder / name)
    nested = saved.get("text_config") or {}
    for key in keys:
        theirs, ours = saved.get(key), mine.get(key)
        if key in nested and theirs is None:
            theirs, ours = nested[key], (mine.get("text_config") or {}).get(key)
        if theirs is not None and ours is not None and theirs != ours:
            raise _other_model(folder, name, f"{key} is {theirs!r}, this model has {ours!r}")


def _other_model(folder: Path, file: str, what: str) -> ValueError:
    return ValueError(f"cannot resume from {folder}: {file} is of another model: {what}. No weight has been changed")


def needs_conversion(model: torch.nn.Module, folder: Path) -> bool:
    """Whether the folder names weights otherwise than the model does (transformers saves in the original format)."""
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return False
    saved = set(saved_shapes(folder))
    return bool(saved) and not saved <= set(model.state_dict())


def load_converted(model: PreTrainedModel, folder: Path) -> None:
    """Loads a folder whose weights have other names than the model's, through `from_pretrained`.

    Raises:
        ValueError: If tensors of the model are still missing.
    """
    fresh = type(model).from_pretrained(folder, config=model.config, dtype=model.dtype)
    result = model.load_state_dict(fresh.state_dict(), strict=False)
    if result.missing_keys:
        raise damaged(folder, "model.safetensors", f"lacks {result.missing_keys[0]}")

"""The model card that is written with every checkpoint."""

import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from posttrain_models import unwrap

PACKAGES = ("posttrain-trainer", "transformers", "torch", "datasets", "accelerate", "peft", "tokenizers")

CLASSIFIER = "SequenceClassification"


def dataset_name(dataset: Any) -> str | None:
    """What a dataset of the hub or of a folder is called, if it says."""
    name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    return name if isinstance(name, str) else None


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of what training depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def model_card(
    *, name: str, method: str, base: str | None, dataset: str | None, adapter: bool, task: str, tags: list[str]
) -> str:
    """The text of README.md.

    Args:
        name: What the model is called.
        method: The training method.
        base: Name or path of the model that training started from.
        dataset: Name of the training data.
        adapter: Whether the folder holds an adapter instead of a whole model.
        task: What the classes that load it end with, such as "CausalLM".
        tags: Tags for the hub.
    """
    hub_base = base if base and "/" in base and not Path(base).exists() else None
    header = {
        "base_model": hub_base,
        "datasets": [dataset] if dataset else None,
        "library_name": "peft" if adapter else "transformers",
        "tags": tags,
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in header.items() if value),
        "---",
        "",
        f"# {name}",
        "",
    ]
    subject = "This adapter was" if adapter else "This model was"
    origin = f" from `{base}`" if base else ""
    data = f" on `{dataset}`" if dataset else ""
    lines += [f"{subject} trained{origin} with {method}{data}, using posttrain.", ""]
    loader = f"{'AutoPeftModel' if adapter else 'AutoModel'}For{task}"
    package = "peft" if adapter else "transformers"
    imports = [f"from {package} import {loader}", "from transformers import AutoTokenizer"]
    if not adapter:
        imports = [f"from transformers import {loader}, AutoTokenizer"]
    lines += [
        "```python",
        *imports,
        "",
        f'model = {loader}.from_pretrained("{name}"{", num_labels=1" if adapter and task == CLASSIFIER else ""})',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        "```",
        "",
        "Versions: " + ", ".join(f"{package} {version}" for package, version in versions().items()) + ".",
        "",
    ]
    return "\n".join(lines)


def task(model: Any) -> str:
    """What the classes end with that load a model as it is: of reward models, or of language models."""
    inner = unwrap(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return CLASSIFIER if type(inner).__name__.endswith(f"For{CLASSIFIER}") else "CausalLM"


def base_name(model: Any) -> str | None:
    """Name or path of the model that training started from."""
    inner = unwrap(model)
    peft = getattr(inner, "peft_config", None)
    if peft:
        return next(iter(peft.values())).base_model_name_or_path or None
    return getattr(getattr(inner, "config", None), "_name_or_path", None) or None

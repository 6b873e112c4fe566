"""The options that several apps have: each once, with its help and its checks."""

import json
from dataclasses import dataclass, field
from typing import Any

from posttrain_trainer import TrainingConfig


@dataclass
class MethodConfig(TrainingConfig):
    """Options that the configs of all apps share, and every option of `transformers.TrainingArguments`."""

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Arguments of `from_pretrained` (a mapping or its JSON), for a model given by name."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model or tokenizer code that a repository brings along."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the rows."})
    max_length: int | None = field(default=1024, metadata={"help": "Longest row in tokens."})
    padding_free: bool | None = field(
        default=None,
        metadata={"help": "Compute no padding token; none does so wherever the model honours sequence boundaries."},
    )
    pad_token: str | None = field(default=None, metadata={"help": "Refused: set `pad_token` on the tokenizer instead."})

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is loaded."""
        super().__post_init__()
        self.model_init_kwargs = mapping_option("model_init_kwargs", self.model_init_kwargs)
        if self.pad_token is not None:
            raise ValueError("pad_token is not an option: set `tokenizer.pad_token` and pass it as processing_class.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2 tokens, or none for no limit; got {self.max_length}.")


@dataclass
class TemplateConfig(MethodConfig):
    """Options of methods that may change what a turn looks like before they train."""

    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "A Jinja file, or a model folder or name, whose chat template (and its tokens) to use."},
    )
    eos_token: str | None = field(
        default=None, metadata={"help": "Token that ends text rows and turns; none takes the tokenizer's."}
    )


@dataclass
class LanguageConfig(MethodConfig):
    """Options of methods that train a language model with its head."""

    router_aux_loss_coef: float | None = field(
        default=None,
        metadata={
            "help": "Weight of a mixture of experts' load-balancing loss; none takes the model's own, 0 turns it off."
        },
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is loaded."""
        super().__post_init__()
        if self.router_aux_loss_coef is not None and self.router_aux_loss_coef < 0:
            raise ValueError(f"router_aux_loss_coef must not be negative; got {self.router_aux_loss_coef}.")
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not offered: it needs the full logits of every token.")


def mapping_option(name: str, value: Any) -> dict[str, Any] | None:
    """An option that is a mapping, or the JSON of one.

    Raises:
        ValueError: Naming the option.

    Example:
        >>> from posttrain_app.config import mapping_option
        >>> mapping_option("model_init_kwargs", '{"revision": "main"}')
        {'revision': 'main'}
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}={value!r} is not JSON: {error}. Write a mapping in braces.") from None
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping; got {value!r}.")
    return value

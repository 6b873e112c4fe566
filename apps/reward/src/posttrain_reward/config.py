"""Options of reward modelling."""

from dataclasses import dataclass, field
from typing import Any

from posttrain_trainer import TrainingConfig
from posttrain_trainer.facade import mapping_option


@dataclass
class RewardConfig(TrainingConfig):
    """Options of `RewardTrainer`: those of reward modelling, and every option of `transformers.TrainingArguments`.

    Example:
        >>> config = RewardConfig("runs/reward", max_length=512, center_rewards_coefficient=0.01)
        >>> config.learning_rate, config.disable_dropout, config.pad_to_multiple_of
        (0.0001, True, 'auto')

    Raises:
        ValueError: an option has a value that cannot be meant; the message names the option and what to write.
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of the optimiser."})

    # Model
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Arguments of `from_pretrained` (a mapping or its JSON), for a model given by name."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model or tokenizer code that a repository brings along."}
    )
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "A Jinja file, or a model folder or name, whose chat template (and its tokens) to use."},
    )
    eos_token: str | None = field(
        default=None, metadata={"help": "Token that ends text rows and turns; none takes the tokenizer's."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Train without the model's dropout."})

    # Data
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the rows."})
    max_length: int | None = field(
        default=1024,
        metadata={"help": "Longest prompt with completion in tokens; pairs with a longer one are left out, not cut."},
    )

    # Batches
    padding_free: bool | None = field(
        default=None,
        metadata={"help": "Compute no padding token; none does so wherever the model honours sequence boundaries."},
    )

    # Loss
    center_rewards_coefficient: float | None = field(
        default=None, metadata={"help": "Weight of the term that keeps rewards around 0; 0.01 is a good value."}
    )
    pad_token: str | None = field(default=None, metadata={"help": "Refused: set `pad_token` on the tokenizer instead."})

    def __post_init__(self):
        """Refuse what cannot be meant, before anything is loaded."""
        super().__post_init__()
        self.model_init_kwargs = mapping_option("model_init_kwargs", self.model_init_kwargs)
        if self.pad_token is not None:
            raise ValueError("pad_token is not an option: set `tokenizer.pad_token` and pass it as processing_class.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2 tokens, or none for no limit; got {self.max_length}.")
        if self.center_rewards_coefficient is not None and self.center_rewards_coefficient < 0:
            raise ValueError(f"center_rewards_coefficient must not be negative; got {self.center_rewards_coefficient}.")
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not offered: give the rows a `margin` instead.")

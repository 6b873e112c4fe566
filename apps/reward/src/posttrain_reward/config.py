"""Options of reward modelling."""

from dataclasses import dataclass, field

from posttrain_app.config import TemplateConfig


@dataclass
class RewardConfig(TemplateConfig):
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
    disable_dropout: bool = field(default=True, metadata={"help": "Train without the model's dropout."})

    # Data
    max_length: int | None = field(
        default=1024,
        metadata={"help": "Longest prompt with completion in tokens; pairs with a longer one are left out, not cut."},
    )

    # Loss
    center_rewards_coefficient: float | None = field(
        default=None, metadata={"help": "Weight of the term that keeps rewards around 0; 0.01 is a good value."}
    )

    def __post_init__(self):
        """Refuse what cannot be meant, before anything is loaded."""
        super().__post_init__()
        if self.center_rewards_coefficient is not None and self.center_rewards_coefficient < 0:
            raise ValueError(f"center_rewards_coefficient must not be negative; got {self.center_rewards_coefficient}.")
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not offered: give the rows a `margin` instead.")

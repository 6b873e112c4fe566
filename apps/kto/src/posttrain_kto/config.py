"""Options of Kahneman-Tversky optimisation."""

from dataclasses import dataclass, field
from typing import Literal

from posttrain_app.preference import PreferenceConfig
from posttrain_losses import preference

LOSSES = {"kto": preference.kto_loss, "apo_zero_unpaired": preference.apo_zero_unpaired}


@dataclass
class KTOConfig(PreferenceConfig):
    """Options of `KTOTrainer`: those of KTO, and every option of `transformers.TrainingArguments`.

    `train_sampling_strategy` is "random", as everywhere here: the mismatched pairs of the KL term are made of the rows
    of each optimiser step, in whatever order they come.

    Example:
        >>> config = KTOConfig("runs/kto", undesirable_weight=1.2)
        >>> config.learning_rate, config.beta, config.loss_type
        (1e-06, 0.1, 'kto')

    Raises:
        ValueError: an option has a value that cannot be meant; the message names the option and what to write.
    """

    loss_type: Literal["kto", "apo_zero_unpaired"] = field(
        default="kto", metadata={"help": "kto, or apo_zero_unpaired, which has no KL term: half the forward passes."}
    )
    desirable_weight: float = field(default=1.0, metadata={"help": "Weight of the rows that are labelled good."})
    undesirable_weight: float = field(default=1.0, metadata={"help": "Weight of the rows that are labelled bad."})

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is loaded."""
        super().__post_init__()
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: write a weight that is not negative.")
        if self.beta <= 0:
            raise ValueError(f"beta={self.beta}: write a number above 0.")

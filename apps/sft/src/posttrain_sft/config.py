"""Options of supervised fine-tuning."""

from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain_app.config import LanguageConfig, TemplateConfig, mapping_option


@dataclass
class SFTConfig(LanguageConfig, TemplateConfig):
    """Options of `SFTTrainer`: those of supervised fine-tuning, and every option of `transformers.TrainingArguments`.

    Example:
        >>> config = SFTConfig("runs/sft", max_length=512, packing=True)
        >>> config.learning_rate, config.loss_type, config.pad_to_multiple_of
        (2e-05, 'nll', 'auto')

    Raises:
        ValueError: an option has a value that cannot be meant; the message names the option and what to write.
    """

    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate of the optimiser."})

    # Data
    dataset_text_field: str = field(default="text", metadata={"help": "Column that holds the text of plain-text rows."})
    dataset_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": 'Only {"skip_prepare_dataset": true}: the rows are tokenised already, take them as they are.'
        },
    )
    max_length: int | None = field(
        default=1024,
        metadata={"help": "Longest row in tokens; longer ones are cut. With packing, the length of a packed row."},
    )
    truncation_mode: Literal["keep_start", "keep_end"] = field(
        default="keep_start", metadata={"help": "Which end of a row that is too long to keep."}
    )
    shuffle_dataset: bool = field(default=False, metadata={"help": "Shuffle the rows once, before packing."})
    completion_only_loss: bool | None = field(
        default=None,
        metadata={"help": "Train on completions alone; none means yes for prompt-completion rows, no for others."},
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "Train on what the assistant says, in any chat template."}
    )
    train_on: Literal["all", "last"] = field(
        default="all", metadata={"help": "With assistant_only_loss: every assistant turn, or the last one alone."}
    )

    # Batches
    packing: bool = field(
        default=False, metadata={"help": "Put several rows into one of max_length tokens; they never see each other."}
    )
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = field(
        default="bfd",
        metadata={
            "help": "bfd: best fit, over-long rows cut; bfd_split: split instead; wrapped: joined and cut anywhere."
        },
    )
    eval_packing: bool | None = field(default=None, metadata={"help": "Pack evaluation rows; none: as packing says."})

    # Loss
    loss_type: Literal["nll", "dft"] = field(
        default="nll",
        metadata={"help": "nll: cross-entropy; dft: dynamic fine-tuning, each token weighed by its own probability."},
    )

    def __post_init__(self):
        """Refuse what cannot be meant, before anything is loaded."""
        if self.loss_type == "chunked_nll":
            raise ValueError("loss_type='chunked_nll' is now simply 'nll': the head never keeps full logits.")
        super().__post_init__()
        self.dataset_kwargs = mapping_option("dataset_kwargs", self.dataset_kwargs)
        unknown = set(self.dataset_kwargs or {}) - {"skip_prepare_dataset"}
        if unknown:
            raise ValueError(f"dataset_kwargs has {sorted(unknown)}; only 'skip_prepare_dataset' is understood.")
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise ValueError("packing needs max_length: the length of a packed row in tokens.")
        if self.train_on == "last" and not self.assistant_only_loss:
            raise ValueError("train_on='last' chooses among assistant turns: set assistant_only_loss=True too.")

"""`RewardTrainer`: preference pairs in, a reward model out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from posttrain_app.describe import mark_targets
from posttrain_app.loading import inner_tokenizer
from posttrain_app.trainer import AppTrainer, Use
from posttrain_collators import PreferenceCollator
from posttrain_data import PreferenceDataOptions, Report, prepare_preferences
from posttrain_models.rewards import load_reward_model
from posttrain_trainer import ShapePlan
from torch import nn
from transformers import AutoModelForSequenceClassification

from posttrain_reward.config import RewardConfig
from posttrain_reward.method import Reward


class RewardTrainer(AppTrainer):
    """Training of a reward model: one number for a prompt with its completion, higher for what people prefer.

    The model is a `*ForSequenceClassification` of transformers with one label, made of a language model by giving it a
    new head, or continued. Save it with `save_model`; it loads with `AutoModelForSequenceClassification`.

    Args:
        model: A name or path, `LoadOptions`, or a model with `num_labels=1` (a `PeftModel` trains the adapter it has).
        args: A `RewardConfig`; plain `TrainingArguments` and None take the defaults for the rest.
        data_collator: Makes a `CompletionBatch` of prepared rows; by default one that follows the shape plan.
        train_dataset: Preference pairs: a `datasets` data set, map-style or streaming, or a list of dicts.
            `prepare_preferences` names the formats.
        eval_dataset: Pairs to evaluate on, or several sets of them by name.
        processing_class: The tokenizer; by default the model's own.
        compute_metrics: Called with `EvalPrediction`: rewards `(N, 2)`, chosen first, and labels that are 0.
        callbacks: Callbacks of transformers.
        optimizers: An optimiser and a scheduler, made beforehand.
        optimizer_cls_and_kwargs: The optimiser's class and arguments.
        preprocess_logits_for_metrics: Changes rewards before they are gathered for `compute_metrics`.
        quantization_config: How to quantise a model given by name.
        peft_config: A configuration of peft, or `LoraOptions`: train an adapter, and the head in full beside it.

    Raises:
        ValueError: For what cannot be trained, before weights are loaded, naming argument, row or column.

    Example:
        >>> from posttrain_data import tiny_tokenizer
        >>> from posttrain_models.rewards import tiny_reward_model
        >>> tokenizer = tiny_tokenizer()
        >>> trainer = RewardTrainer(
        ...     model=tiny_reward_model("llama", vocab_size=len(tokenizer)),
        ...     args=RewardConfig(str(getfixture("tmp_path")), max_steps=1, report_to="none", use_cpu=True),
        ...     train_dataset=[{"prompt": "2+2 is", "chosen": " four", "rejected": " five"}],
        ...     processing_class=tokenizer,
        ... )
        >>> trainer.method
        Reward(center_rewards_coefficient=0.0)
    """

    config_class = RewardConfig
    collator_class = PreferenceCollator
    num_completions = 2
    load = staticmethod(load_reward_model)
    head = "score"

    def check(self, sets: Mapping[str, Any], compute_metrics: Callable | None, peft_config: Any) -> None:
        """Refuse an adapter that would leave the new head as it was drawn."""
        task = getattr(peft_config, "task_type", "SEQ_CLS")
        if task != "SEQ_CLS":
            raise ValueError(
                f"peft_config has task_type={getattr(task, 'value', task)!r}: write 'SEQ_CLS', with which the head of "
                "a reward model trains beside the adapter and is saved with it."
            )

    def prepare(self, dataset: Any, name: str, use: Use) -> tuple[Any, Report | None]:
        """Pairs as token ids; one with a side that is too long is left out whole."""
        args = self.args
        options = PreferenceDataOptions(max_length=args.max_length, overlong="drop", num_proc=args.dataset_num_proc)
        return prepare_preferences(dataset, self.processing_class, options, name=name)

    def ends(self) -> list[int]:
        """None: a reward model writes nothing."""
        return []

    def sketch(self, language_model: nn.Module) -> nn.Module:
        """The classifier of the same configuration, on the meta device."""
        config = language_model.config
        config.num_labels = 1
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config)

    def make_method(self, plan: ShapePlan, coefficient: float) -> Reward:
        """The method that the options describe."""
        return Reward(center_rewards_coefficient=self.args.center_rewards_coefficient or 0.0)

    def show_row(self, number: int, row: Any) -> str:
        """A pair as the model sees it, its completions marked."""
        lines = [f"pair {number}: completions between guillemets"]
        prompt = list(row.get("prompt_ids") or [])
        for side in ("chosen", "rejected"):
            found = list(row[f"{side}_ids"])
            marked = {"input_ids": prompt + found, "loss_mask": [False] * len(prompt) + [True] * len(found)}
            lines.append(f"{side + ':':<9} {mark_targets(inner_tokenizer(self.processing_class), marked)}")
        return "\n".join(lines)

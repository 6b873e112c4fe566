"""`SFTTrainer`: rows in, a fine-tuned model out."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from posttrain_app.describe import mark_targets
from posttrain_app.loading import inner_tokenizer
from posttrain_app.shapes import plan_rows
from posttrain_app.trainer import AppTrainer, Use
from posttrain_collators import TokenCollator
from posttrain_data import Report, SFTDataOptions, prepare_sft
from posttrain_trainer import ShapePlan
from torch import nn

from posttrain_sft.config import SFTConfig
from posttrain_sft.method import SFT


class SFTTrainer(AppTrainer):
    """Supervised fine-tuning of a language model.

    Args:
        model: A name or path, `LoadOptions`, or a model (a `PeftModel` trains the adapter it has).
        args: An `SFTConfig`; plain `TrainingArguments` and None take the defaults for the rest.
        data_collator: Makes a `TokenBatch` of prepared rows; by default one that follows the shape plan.
        train_dataset: Rows: a `datasets` data set, map-style or streaming, or a list of dicts. `prepare_sft`
            names the formats.
        eval_dataset: Rows to evaluate on, or several sets of them by name.
        processing_class: The tokenizer or processor; by default the model's own.
        compute_loss_func: Refused: write a method (docs/custom-method.md).
        compute_metrics: Called with `EvalPrediction`; needs full logits, so evaluation costs a second forward.
        callbacks: Callbacks of transformers.
        optimizers: An optimiser and a scheduler, made beforehand.
        optimizer_cls_and_kwargs: The optimiser's class and arguments.
        preprocess_logits_for_metrics: Reduces logits before they are gathered for `compute_metrics`.
        quantization_config: How to quantise a model given by name.
        peft_config: A configuration of peft, or `LoraOptions`: train an adapter.
        formatting_func: Makes a row's text, or its messages.

    Raises:
        ValueError: For what cannot be trained, before weights are loaded, naming argument, row or column.

    Example:
        >>> from posttrain_data import tiny_tokenizer
        >>> from posttrain_models import tiny_model
        >>> tokenizer = tiny_tokenizer()
        >>> trainer = SFTTrainer(
        ...     model=tiny_model("llama", vocab_size=len(tokenizer)),
        ...     args=SFTConfig(str(getfixture("tmp_path")), max_steps=1, report_to="none", use_cpu=True),
        ...     train_dataset=[{"text": "one two three"}],
        ...     processing_class=tokenizer,
        ... )
        >>> trainer.method
        SFT(dft=False, router_aux_loss_coef=0.0)
    """

    config_class = SFTConfig
    formatting_func: Callable | None = None

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_loss_func: Callable | None = None,
        formatting_func: Callable | None = None,
        **others: Any,
    ) -> None:
        if compute_loss_func is not None:
            raise ValueError("compute_loss_func is not offered: write a method, see docs/custom-method.md.")
        self.formatting_func = formatting_func
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, processing_class, **others)

    def check(self, sets: Mapping[str, Any], compute_metrics: Callable | None, peft_config: Any) -> None:
        """Refuse metrics of packed rows."""
        if compute_metrics is not None and self._packing("evaluate"):
            raise ValueError("compute_metrics needs rows as they are: set eval_packing=False.")

    def prepare(self, dataset: Any, name: str, use: Use) -> tuple[Any, Report | None]:
        """Rows as token ids with their targets, packed where the options say so."""
        args = self.args
        if use == "train" and args.shuffle_dataset:
            dataset = _shuffled(dataset, args.seed)
        if (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
            return check_tokenised(dataset, name), None
        options = SFTDataOptions(
            max_length=args.max_length,
            truncation_mode=args.truncation_mode,
            completion_only=args.completion_only_loss,
            assistant_only=args.assistant_only_loss,
            train_on=args.train_on,
            text_field=args.dataset_text_field,
            packing=self._packing(use),
            packing_strategy=args.packing_strategy,
            num_proc=args.dataset_num_proc,
            formatting_func=self.formatting_func,
        )
        return prepare_sft(dataset, self.processing_class, options, name=name)

    def _packing(self, use: Use) -> bool:
        """Whether rows are packed; a prediction is of one row."""
        args = self.args
        return use != "predict" and (args.packing if use == "train" or args.eval_packing is None else args.eval_packing)

    def plan_shapes(self, model: nn.Module, *datasets: Any) -> ShapePlan:
        """The layout and widths of a run on rows of tokens."""
        return plan_rows(model, self.args, *datasets)

    def make_collator(self, plan: ShapePlan, pad_id: int) -> TokenCollator:
        """What makes a batch of prepared rows, in the widths of the plan."""
        return TokenCollator(plan.padding(pad_id))

    def make_method(self, plan: ShapePlan, coefficient: float) -> SFT:
        """The method that the options describe."""
        return SFT(dft=self.args.loss_type == "dft", router_aux_loss_coef=coefficient)

    def show_row(self, number: int, row: Any) -> str:
        """A row with its targets marked."""
        shown = mark_targets(inner_tokenizer(self.processing_class), row)
        return f"row {number}: {len(row['input_ids'])} tokens, targets between guillemets\n{shown}"


def check_tokenised(dataset: Any, name: str) -> Any:
    """Rows that are taken as they are, if they can be.

    Raises:
        ValueError: Naming the data set and the column.
    """
    if hasattr(dataset, "__len__") and not len(dataset):
        raise ValueError(f"{name}: the data set is empty: give at least one row.")
    first = next(iter(dataset), None)
    if first is None or first.get("input_ids") is None:
        columns = ", ".join(map(repr, first or ()))
        raise ValueError(f"{name}: row 0 has no 'input_ids' (columns: {columns}), which skip_prepare_dataset needs.")
    for column in ("completion_mask", "assistant_masks"):
        if first.get(column) is not None and first.get("loss_mask") is None and first.get("labels") is None:
            raise ValueError(
                f"{name}: column {column!r} is read by the preparation, which skip_prepare_dataset leaves out: "
                "write 'labels' or 'loss_mask'."
            )
    return dataset


def _shuffled(dataset: Any, seed: int) -> Any:
    if isinstance(dataset, list | tuple):
        return random.Random(seed).sample(list(dataset), len(dataset))
    return dataset.shuffle(seed=seed)

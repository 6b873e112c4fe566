"""`KTOTrainer`: completions that were judged good or bad in, a model that writes more of the good ones out."""

import logging
from typing import Any

from posttrain_app.preference import PreferenceTrainer
from posttrain_app.trainer import Use
from posttrain_collators import FeedbackCollator
from posttrain_data import Report, prepare_feedback
from posttrain_trainer import ShapePlan

from posttrain_kto.config import LOSSES, KTOConfig
from posttrain_kto.method import KTO

logger = logging.getLogger("posttrain")


class KTOTrainer(PreferenceTrainer):
    """Kahneman-Tversky optimisation of a language model.

    Args:
        model: A name or path, `LoadOptions`, or a model (a `PeftModel` trains the adapter it has).
        ref_model: The reference, in any of these forms. By default what `model` is before training: with an adapter
            the model without it, otherwise a second copy.
        args: A `KTOConfig`; plain `TrainingArguments` and None take the defaults for the rest.
        data_collator: Makes a `CompletionBatch` of prepared rows; by default one that follows the shape plan.
        train_dataset: Completions with a label, or preference pairs, which are taken apart: a `datasets` data set,
            map-style or streaming, or a list of dicts. `prepare_feedback` names the formats.
        eval_dataset: Rows to evaluate on, or several sets of them by name.
        processing_class: The tokenizer or processor; by default the model's own.
        compute_metrics: Called with `EvalPrediction`: rewards `(N,)`, and labels that are 1 where desirable.
        callbacks: Callbacks of transformers.
        optimizers: An optimiser and a scheduler, made beforehand.
        optimizer_cls_and_kwargs: The optimiser's class and arguments.
        preprocess_logits_for_metrics: Changes rewards before they are gathered for `compute_metrics`.
        quantization_config: How to quantise a model given by name.
        peft_config: A configuration of peft, or `LoraOptions`: train an adapter.

    Raises:
        ValueError: For what cannot be trained, before weights are loaded, naming argument, row or column.

    Example:
        >>> from posttrain_data import tiny_tokenizer
        >>> from posttrain_models import tiny_model
        >>> tokenizer = tiny_tokenizer()
        >>> trainer = KTOTrainer(
        ...     model=tiny_model("llama", vocab_size=len(tokenizer)),
        ...     args=KTOConfig(str(getfixture("tmp_path")), max_steps=1, report_to="none", use_cpu=True),
        ...     train_dataset=[{"prompt": "2+2 is", "completion": " four", "label": True}],
        ...     processing_class=tokenizer,
        ... )
        >>> trainer.method.beta
        0.1
    """

    config_class = KTOConfig
    collator_class = FeedbackCollator
    num_completions = 1
    read_rows = staticmethod(prepare_feedback)

    def prepare(self, dataset: Any, name: str, use: Use) -> tuple[Any, Report | None]:
        """Completions as token ids; a line says whether the weights balance them."""
        rows, report = super().prepare(dataset, name, use)
        if use == "train" and self.args.loss_type == "kto" and hasattr(rows, "__len__"):
            check_balance(rows, self.args)
        return rows, report

    def make_method(self, plan: ShapePlan, coefficient: float) -> KTO:
        """The method that the options describe."""
        return KTO(
            loss_function=LOSSES[self.args.loss_type],
            beta=self.args.beta,
            desirable_weight=self.args.desirable_weight,
            undesirable_weight=self.args.undesirable_weight,
            share_prompts=plan.layout == "shared" and not plan.static,
            ranks=lambda: self.ranks,
            router_aux_loss_coef=coefficient,
        )


def check_balance(rows: Any, args: KTOConfig) -> None:
    """Say when the weights of good and bad rows are outside of what the paper (section 4.2) found to work."""
    labels = rows["label"] if hasattr(rows, "column_names") else [row["label"] for row in rows]
    good = sum(map(bool, labels))
    bad = len(labels) - good
    share = args.desirable_weight * good, args.undesirable_weight * bad
    if bad and good and not share[1] <= share[0] <= 4 / 3 * share[1]:
        low, high = share[1] / good, 4 / 3 * share[1] / good
        logger.warning(
            f"{good} rows are labelled good and {bad} bad: desirable_weight between {low:.2f} and {high:.2f} would "
            "balance them"
        )

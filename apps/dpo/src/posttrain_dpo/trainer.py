"""`DPOTrainer`: preference pairs in, a model that prefers what was preferred out."""

from posttrain_app.preference import PreferenceTrainer
from posttrain_collators import PreferenceCollator
from posttrain_data import prepare_preferences
from posttrain_trainer import ShapePlan

from posttrain_dpo.config import DPOConfig
from posttrain_dpo.method import DPO


class DPOTrainer(PreferenceTrainer):
    """Direct preference optimisation of a language model.

    Args:
        model: A name or path, `LoadOptions`, or a model (a `PeftModel` trains the adapter it has).
        ref_model: The reference, in any of these forms. By default what `model` is before training: with an adapter
            the model without it, otherwise a second copy.
        args: A `DPOConfig`; plain `TrainingArguments` and None take the defaults for the rest.
        data_collator: Makes a `CompletionBatch` of prepared rows; by default one that follows the shape plan.
        train_dataset: Preference pairs: a `datasets` data set, map-style or streaming, or a list of dicts.
            `prepare_preferences` names the formats.
        eval_dataset: Pairs to evaluate on, or several sets of them by name.
        processing_class: The tokenizer or processor; by default the model's own.
        compute_metrics: Called with `EvalPrediction`: rewards `(N, 2)`, chosen first, and labels that are 0.
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
        >>> trainer = DPOTrainer(
        ...     model=tiny_model("llama", vocab_size=len(tokenizer)),
        ...     args=DPOConfig(str(getfixture("tmp_path")), max_steps=1, report_to="none", use_cpu=True),
        ...     train_dataset=[{"prompt": "2+2 is", "chosen": " four", "rejected": " five"}],
        ...     processing_class=tokenizer,
        ... )
        >>> trainer.method.beta
        0.1
    """

    config_class = DPOConfig
    collator_class = PreferenceCollator
    num_completions = 2
    read_rows = staticmethod(prepare_preferences)

    def make_method(self, plan: ShapePlan, coefficient: float) -> DPO:
        """The method that the options describe."""
        args = self.args
        return DPO(
            losses=args.losses(),
            beta=args.beta,
            ld_alpha=args.ld_alpha,
            use_weighting=args.use_weighting,
            router_aux_loss_coef=coefficient,
        )

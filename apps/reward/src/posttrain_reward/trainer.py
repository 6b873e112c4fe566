"""`RewardTrainer`: preference pairs in, a reward model out."""

import logging
from collections.abc import Callable
from typing import Any

from posttrain_collators import PreferenceCollator
from posttrain_data import PreferenceDataOptions, clone_chat_template, prepare_preferences
from posttrain_models import fit_tokens, unwrap
from posttrain_models.rewards import load_reward_model
from posttrain_trainer import ShapePlan, Trainer
from posttrain_trainer.facade import (
    check_run,
    disable_dropout,
    inner_tokenizer,
    load_options,
    plan_completions,
    prepared_sets,
    resolve_args,
    resolve_model,
    resolve_tokenizer,
    sketch,
)

from posttrain_reward.config import RewardConfig
from posttrain_reward.method import Reward

logger = logging.getLogger("posttrain")


class RewardTrainer(Trainer):
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

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        args = resolve_args(args, RewardConfig, model, "Reward")
        check_run(args, train_dataset, eval_dataset)
        check_adapter(peft_config)
        processing_class, added = make_tokenizer(model, args, processing_class)
        tokenizer = inner_tokenizer(processing_class)
        self.args, self.processing_class = args, processing_class
        train_dataset = self.prepare_rows(train_dataset, "train")
        eval_dataset = prepared_sets(eval_dataset, self.prepare_rows)

        options = load_options(model, args)
        cut = sketch(options, args) if options is not None and (args.padding_free or args.max_shapes) else None
        if cut is not None:
            plan_completions(cut, args, 2, train_dataset, eval_dataset)
        model = resolve_model(
            model,
            args,
            quantization_config=quantization_config,
            peft_config=peft_config,
            fit=lambda loaded: fit_tokens(loaded, tokenizer),
            load=load_reward_model,
        )
        if added and not unwrap(model).get_input_embeddings().weight.requires_grad:
            logger.warning(
                "chat_template_path brought %d tokens whose embeddings the adapter leaves as they are: train them with "
                "lora_modules_to_save embed_tokens score",
                len(added),
            )
        if args.disable_dropout:
            disable_dropout(model)
        plan = plan_completions(model, args, 2, train_dataset, eval_dataset)
        logger.info(str(plan))
        super().__init__(
            model=model,
            method=Reward(center_rewards_coefficient=args.center_rewards_coefficient or 0.0),
            args=args,
            data_collator=data_collator or make_collator(plan, tokenizer.pad_token_id),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            shape_plan=plan,
        )

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict:
        """Evaluate on the data set of the constructor, or on other rows, which are prepared in the same way."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = prepared_sets(eval_dataset, self.prepare_rows)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """Rewards `(N, 2)`, labels and metrics of pairs, which are prepared as evaluation rows are."""
        return super().predict(self.prepare_rows(test_dataset, metric_key_prefix), ignore_keys, metric_key_prefix)

    def prepare_rows(self, dataset: Any, name: str) -> Any:
        """Pairs as token ids; says what became of them."""
        prepared = prepare_preferences(dataset, self.processing_class, data_options(self.args), name=name)
        logger.info(str(prepared.report))
        return prepared.dataset


def check_adapter(peft_config: Any) -> None:
    """Refuse an adapter that would leave the new head as it was drawn.

    Raises:
        ValueError: Naming the task it is for and what to write instead.
    """
    task = getattr(peft_config, "task_type", "SEQ_CLS")
    if task != "SEQ_CLS":
        raise ValueError(
            f"peft_config has task_type={getattr(task, 'value', task)!r}: write 'SEQ_CLS', with which the head of a "
            "reward model trains beside the adapter and is saved with it."
        )


def make_collator(plan: ShapePlan, pad_id: int) -> PreferenceCollator:
    """What makes a batch of prepared pairs, in the widths of a plan."""
    return PreferenceCollator(plan.prompt_padding(pad_id), plan.padding(pad_id))


def data_options(args: RewardConfig) -> PreferenceDataOptions:
    """How the rows of a run are prepared: a pair with a side that is too long is left out whole."""
    return PreferenceDataOptions(max_length=args.max_length, overlong="drop", num_proc=args.dataset_num_proc)


def make_tokenizer(model: Any, args: RewardConfig, processing_class: Any = None) -> tuple[Any, list[int]]:
    """The tokenizer of a run, with the chat template that the options name, and the tokens it added."""
    processing_class = resolve_tokenizer(model, args, processing_class)
    if args.chat_template_path is None:
        return processing_class, []
    return processing_class, clone_chat_template(None, inner_tokenizer(processing_class), args.chat_template_path)

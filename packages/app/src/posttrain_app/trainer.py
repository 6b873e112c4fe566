"""What the trainers of all apps do around their formula: from a name and rows to a run."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

from posttrain_data import Report, terminators
from posttrain_models import fit_tokens, load_model, unwrap
from posttrain_trainer import Method, ShapePlan, Trainer
from posttrain_trainer.checks import check_objects
from torch import nn

from posttrain_app.arguments import check_run, resolve_args
from posttrain_app.config import LanguageConfig, MethodConfig
from posttrain_app.describe import shortened
from posttrain_app.loading import (
    check_adapter,
    cut_of,
    disable_dropout,
    inner_tokenizer,
    load_options,
    resolve_model,
    resolve_tokenizer,
)
from posttrain_app.methods import balancing_coefficient
from posttrain_app.shapes import plan_completions

logger = logging.getLogger("posttrain")

Use = Literal["train", "evaluate", "predict"]
# Options that not every model can honour: whether this one does is tried before its weights are loaded.
DEMANDING = ("packing", "padding_free", "max_shapes", "router_aux_loss_coef")


class AppTrainer(Trainer, ABC):
    """The trainer of an app: from a model's name and raw rows to the loop.

    A subclass sets `config_class`, and says how rows are prepared (`prepare`) and learned from (`make_method`). One
    whose rows are prompts with completions sets `collator_class` and `num_completions`; another one overrides
    `make_collator`, `plan_shapes` and `show_row`. What else methods differ in is in the remaining hooks.

    A hook reads `self.args` and `self.processing_class`, and no model: `posttrain plan` asks the same hooks, so that it
    shows what training does.

    Args:
        model: A name or path, `LoadOptions`, or a model (a `PeftModel` trains the adapter it has).
        args: A `config_class`; plain `TrainingArguments` and None take the defaults for the rest.
        data_collator: Makes a batch of prepared rows; by default one that follows the shape plan.
        train_dataset: Rows: a `datasets` data set, map-style or streaming, or a list of dicts.
        eval_dataset: Rows to evaluate on, or several sets of them by name.
        processing_class: The tokenizer or processor; by default the model's own.
        compute_metrics: Called with `EvalPrediction`.
        callbacks: Callbacks of transformers.
        optimizers: An optimiser and a scheduler, made beforehand.
        optimizer_cls_and_kwargs: The optimiser's class and arguments.
        preprocess_logits_for_metrics: Changes predictions before they are gathered for `compute_metrics`.
        quantization_config: How to quantise a model given by name.
        peft_config: A configuration of peft, or `LoraOptions`: train an adapter.

    Raises:
        ValueError: For what cannot be trained, before weights are loaded, naming argument, row or column.

    Example:
        A method of one sampled answer, and its trainer:

        >>> from dataclasses import dataclass
        >>> from posttrain_app import AppTrainer, LanguageConfig
        >>> from posttrain_collators import FeedbackCollator
        >>> from posttrain_data import prepare_feedback, tiny_tokenizer
        >>> from posttrain_models import completion_logps, tiny_model
        >>> @dataclass(frozen=True)
        ... class Likelihood:
        ...     def count(self, batch):
        ...         return batch.completion_mask.any(-1).sum()
        ...     def loss(self, model, batch):
        ...         sign = batch.extras.labels * 2 - 1  # (P,)
        ...         return -(sign * completion_logps(model, batch).sum((1, 2))).sum(), {}
        >>> class LikelihoodTrainer(AppTrainer):
        ...     config_class, collator_class, num_completions = LanguageConfig, FeedbackCollator, 1
        ...     def prepare(self, dataset, name, use):
        ...         return prepare_feedback(dataset, self.processing_class, name=name)
        ...     def make_method(self, plan, coefficient):
        ...         return Likelihood()
        >>> tokenizer = tiny_tokenizer()
        >>> trainer = LikelihoodTrainer(
        ...     model=tiny_model("llama", vocab_size=len(tokenizer)),
        ...     args=LanguageConfig(str(getfixture("tmp_path")), max_steps=1, report_to="none", use_cpu=True),
        ...     train_dataset=[{"prompt": "2+2 is", "completion": " four", "label": True}],
        ...     processing_class=tokenizer,
        ... )
        >>> trainer.method, len(trainer.train_dataset)
        (Likelihood(), 1)
    """

    config_class: ClassVar[type[MethodConfig]]
    collator_class: ClassVar[Callable[..., Any]]  # of prompts with completions
    num_completions: ClassVar[int]  # of a prompt
    load: ClassVar[Callable[..., Any]] = staticmethod(load_model)
    head: ClassVar[str] = "lm_head"

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        self.args = resolve_args(args, self.config_class, model)
        check_objects(None, callbacks, compute_metrics)
        self.check_all(model, train_dataset, eval_dataset, compute_metrics, peft_config)
        self.processing_class, added = resolve_tokenizer(model, self.args, processing_class)
        train_dataset = self._rows(train_dataset, "train", "train")
        eval_dataset = self.prepare_eval(eval_dataset)
        self._try_on_cut(model, train_dataset, eval_dataset)

        load = partial(self._load, quantization_config=quantization_config)
        model = load(model, peft_config=peft_config)
        if added and not unwrap(model).get_input_embeddings().weight.requires_grad:
            logger.warning(
                "chat_template_path brought %d tokens whose embeddings the adapter leaves as they are: train them with "
                "lora_modules_to_save embed_tokens %s",
                len(added),
                self.head,
            )
        coefficient = self.balancing(unwrap(model))
        if getattr(self.args, "disable_dropout", False):
            disable_dropout(model)
        plan = self.plan_shapes(model, train_dataset, eval_dataset)
        logger.info(str(plan))
        pad_id = inner_tokenizer(self.processing_class).pad_token_id
        super().__init__(
            model=model,
            method=self.complete_method(self.make_method(plan, coefficient), model, partial(load, another=True)),
            args=self.args,
            data_collator=data_collator or self.make_collator(plan, pad_id),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            shape_plan=plan,
        )

    @classmethod
    def unloaded(cls, args: MethodConfig, processing_class: Any) -> Self:
        """As much of a trainer as its hooks read, for a plan."""
        made = cls.__new__(cls)
        made.args, made.processing_class = args, processing_class
        return made

    # ---- What a method must say ----

    @abstractmethod
    def prepare(self, dataset: Any, name: str, use: Use) -> tuple[Any, Report | None]:
        """Rows as token ids, and what became of them, where something did.

        Args:
            dataset: The rows.
            name: What messages call them.
            use: What they are for.
        """

    @abstractmethod
    def make_method(self, plan: ShapePlan, coefficient: float) -> Any:
        """The method that the options describe, with the load-balancing loss's weight."""

    # ---- What a method may say ----

    def check(self, sets: Mapping[str, Any], compute_metrics: Callable | None, peft_config: Any) -> None:
        """Refuse arguments that do not suit the method, before anything is read; `sets` are the rows by argument."""

    def ends(self) -> list[int]:
        """Tokens at which the trained model is to stop writing."""
        return terminators(inner_tokenizer(self.processing_class))

    def sketch(self, language_model: nn.Module) -> nn.Module:
        """The model that is trained, without weights, as made of a language model without weights."""
        return language_model

    def plan_shapes(self, model: nn.Module, *datasets: Any) -> ShapePlan:
        """The layout and widths of a run on prepared rows, or on sets of them by name; None is no rows.

        Raises:
            ValueError: Options contradict each other, or the model cannot do what they ask.
        """
        return plan_completions(model, self.args, self.num_completions, *datasets)

    def make_collator(self, plan: ShapePlan, pad_id: int) -> Callable:
        """What makes a batch of prepared rows, in the widths of the plan."""
        return self.collator_class(plan.prompt_padding(pad_id), plan.padding(pad_id))

    def complete_method(self, method: Any, model: nn.Module, load: Callable[[Any], nn.Module]) -> Method:
        """The method with what only a loaded model can give it; `load` loads another model as this one was."""
        return method

    def needs_copy(self, plan: ShapePlan, adapter: bool) -> bool:
        """Whether a second copy of the model is held while it trains, with an adapter or without."""
        return False

    def show_row(self, number: int, row: Any) -> str:
        """A prepared row, for a person to read."""
        tokenizer = inner_tokenizer(self.processing_class)
        label = f", labelled {'good' if row['label'] else 'bad'}" if "label" in row else ""
        parts = {f"{key.removesuffix('_ids')},": ids for key, ids in row.items() if key.endswith("_ids")}
        width = max(map(len, parts))
        shown = (f"{key:<{width}} {len(ids)} tokens: {shortened(tokenizer.decode(ids))}" for key, ids in parts.items())
        return "\n".join([f"row {number}{label}:", *shown])

    # ---- The pipeline ----

    def check_all(
        self,
        model: Any,
        train_dataset: Any,
        eval_dataset: Any,
        compute_metrics: Callable | None = None,
        peft_config: Any = None,
    ) -> None:
        """Refuse a run that cannot be, before anything is read or loaded.

        Raises:
            ValueError: Naming the argument or option and what to write instead.
        """
        check_run(self.args, train_dataset, eval_dataset)
        check_adapter(load_options(model, self.args), peft_config)
        sets = {"train_dataset": train_dataset}
        if isinstance(eval_dataset, dict):
            sets |= {f"eval_dataset[{name!r}]": rows for name, rows in eval_dataset.items()}
        elif eval_dataset is not None:
            sets["eval_dataset"] = eval_dataset
        self.check(sets, compute_metrics, peft_config)

    def _rows(self, dataset: Any, name: str, use: Use) -> Any:
        rows, report = self.prepare(dataset, name, use)
        if report is not None:
            logger.info(str(report))
        return rows

    def prepare_eval(self, dataset: Any) -> Any:
        """Rows to evaluate on, or several sets of them by name, as token ids."""
        if dataset is None:
            return None
        if isinstance(dataset, dict):
            return {name: self._rows(rows, f"eval {name}", "evaluate") for name, rows in dataset.items()}
        return self._rows(dataset, "eval", "evaluate")

    def _try_on_cut(self, model: Any, *datasets: Any) -> None:
        """Refuse what this model cannot do before its weights are loaded."""
        if any(getattr(self.args, name, None) for name in DEMANDING):
            cut = cut_of(model, self.args)
            if cut is not None:
                self.balancing(cut)
                self.plan_shapes(cut, *datasets)

    def _load(self, model: Any, quantization_config: Any, peft_config: Any = None, another: bool = False) -> nn.Module:
        tokenizer, ends = inner_tokenizer(self.processing_class), self.ends()
        given = self.args.model_init_kwargs or {}
        if another:  # the revision is one of the model that is trained
            given = {name: value for name, value in given.items() if name != "revision"}
        return resolve_model(
            model,
            self.args,
            model_init_kwargs=given,
            quantization_config=quantization_config,
            peft_config=peft_config,
            fit=lambda loaded: fit_tokens(loaded, tokenizer, ends),
            load=self.load,
        )

    def balancing(self, model: nn.Module) -> float:
        """The weight of a mixture of experts' load-balancing loss; 0 of methods without one."""
        options = self.args
        return (
            balancing_coefficient(model, options.router_aux_loss_coef) if isinstance(options, LanguageConfig) else 0.0
        )

    # ---- Evaluation ----

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict:
        """Evaluate on the data set of the constructor, or on other rows, which are prepared in the same way."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.prepare_eval(eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """What the method predicts of rows, their labels, and metrics; rows are prepared as evaluation rows are."""
        rows = self._rows(test_dataset, metric_key_prefix, "predict")
        return super().predict(rows, ignore_keys, metric_key_prefix)

"""`SFTTrainer`: rows in, a fine-tuned model out."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from posttrain_collators import TokenCollator
from posttrain_data import SFTDataOptions, clone_chat_template, prepare_sft, terminators
from posttrain_devices import device_spec
from posttrain_models import choose_layout, fit_tokens, unwrap
from posttrain_trainer import ShapePlan, Trainer, resolve_shapes
from posttrain_trainer.facade import (
    balancing_coefficient,
    check_run,
    inner_tokenizer,
    load_options,
    prepared_sets,
    resolve_args,
    resolve_model,
    resolve_tokenizer,
    sketch,
)

from posttrain_sft.checks import check_tokenised, eval_packing
from posttrain_sft.config import SFTConfig
from posttrain_sft.method import SFT

logger = logging.getLogger("posttrain")


class SFTTrainer(Trainer):
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

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable | None = None,
    ):
        args = resolve_args(args, SFTConfig, model, "SFT")
        if compute_loss_func is not None:
            raise ValueError("compute_loss_func is not offered: write a method, see docs/custom-method.md.")
        check_run(args, train_dataset, eval_dataset)
        if compute_metrics is not None and eval_packing(args):
            raise ValueError("compute_metrics needs rows as they are: set eval_packing=False.")
        processing_class, added = make_tokenizer(model, args, processing_class)
        tokenizer = inner_tokenizer(processing_class)
        self._data_options = data_options(args, formatting_func)
        self._skip_preparation = bool((args.dataset_kwargs or {}).get("skip_prepare_dataset"))
        if args.shuffle_dataset:
            train_dataset = _shuffled(train_dataset, args.seed)
        train_dataset = self._prepared(train_dataset, processing_class, self._data_options, "train")
        eval_dataset = self._prepared_eval(eval_dataset, processing_class, args)

        options = load_options(model, args)
        demanding = args.packing or args.padding_free or args.max_shapes or args.router_aux_loss_coef
        cut = sketch(options, args) if options is not None and demanding else None
        if cut is not None:
            balancing_coefficient(cut, args.router_aux_loss_coef)
            plan_shapes(cut, args, train_dataset, eval_dataset)
        model = resolve_model(
            model,
            args,
            quantization_config=quantization_config,
            peft_config=peft_config,
            fit=lambda loaded: fit_tokens(loaded, tokenizer, terminators(tokenizer)),
        )
        if added and not unwrap(model).get_input_embeddings().weight.requires_grad:
            logger.warning(
                "chat_template_path brought %d tokens whose embeddings the adapter leaves as they are: train them with "
                "lora_modules_to_save embed_tokens lm_head",
                len(added),
            )
        plan = plan_shapes(model, args, train_dataset, eval_dataset)
        logger.info(str(plan))
        super().__init__(
            model=model,
            method=SFT(
                dft=args.loss_type == "dft",
                router_aux_loss_coef=balancing_coefficient(unwrap(model), args.router_aux_loss_coef),
            ),
            args=args,
            data_collator=data_collator or TokenCollator(plan.padding(tokenizer.pad_token_id)),
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
            eval_dataset = self._prepared_eval(eval_dataset, self.processing_class, self.args)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """Logits, labels and metrics of rows, which are prepared as evaluation rows are."""
        options = replace(self._data_options, packing=False)
        rows = self._prepared(test_dataset, self.processing_class, options, metric_key_prefix)
        return super().predict(rows, ignore_keys, metric_key_prefix)

    def _prepared(self, dataset: Any, processing_class: Any, options: SFTDataOptions, name: str) -> Any:
        if self._skip_preparation:
            return check_tokenised(dataset, name)
        prepared = prepare_sft(dataset, processing_class, options, name=name)
        logger.info(str(prepared.report))
        return prepared.dataset

    def _prepared_eval(self, dataset: Any, processing_class: Any, args: SFTConfig) -> Any:
        options = replace(self._data_options, packing=eval_packing(args))
        return prepared_sets(dataset, lambda rows, name: self._prepared(rows, processing_class, options, name))


def data_options(args: SFTConfig, formatting_func: Callable | None = None) -> SFTDataOptions:
    """How the rows of a run are prepared."""
    return SFTDataOptions(
        max_length=args.max_length,
        truncation_mode=args.truncation_mode,
        completion_only=args.completion_only_loss,
        assistant_only=args.assistant_only_loss,
        train_on=args.train_on,
        text_field=args.dataset_text_field,
        packing=args.packing,
        packing_strategy=args.packing_strategy,
        num_proc=args.dataset_num_proc,
        formatting_func=formatting_func,
    )


def make_tokenizer(model: Any, args: SFTConfig, processing_class: Any = None) -> tuple[Any, list[int]]:
    """The tokenizer or processor of a run, with the chat template that the options name, and the tokens it added."""
    processing_class = resolve_tokenizer(model, args, processing_class)
    if args.chat_template_path is None:
        return processing_class, []
    return processing_class, clone_chat_template(None, inner_tokenizer(processing_class), args.chat_template_path)


def _shuffled(dataset: Any, seed: int) -> Any:
    if isinstance(dataset, list | tuple):
        import random

        return random.Random(seed).sample(list(dataset), len(dataset))
    return dataset.shuffle(seed=seed)


def plan_shapes(model: Any, args: SFTConfig, *datasets: Any) -> ShapePlan:
    """The layout and widths of a run on prepared data sets, remembered on the model.

    Args:
        model: The model; its layout is probed.
        args: The options.
        datasets: Prepared rows, sets of them by name, or None; their lengths decide the widths.

    Raises:
        ValueError: Options contradict each other, or the model cannot do what they ask.
    """
    spec = device_spec(args.device)
    wanted = {None: "auto", True: "packed", False: "padded"}[args.padding_free]
    if args.packing and args.padding_free is False and not spec.static_shapes:
        raise ValueError("packing=True keeps rows apart by computing no padding: leave padding_free=False out.")
    if args.max_shapes is not None and args.padding_free is None and not args.packing:
        wanted = "padded"
    # Probed in the precision of training, which decides the attention kernel.
    half = torch.bfloat16 if args.bf16 else torch.float16
    with torch.autocast(args.device.type, half, enabled=bool(args.bf16 or args.fp16)):
        layout = choose_layout(model, wanted, static_shapes=spec.static_shapes)
    return resolve_shapes(
        max_length=args.max_length,
        batch_size=args.per_device_train_batch_size,
        packing=args.packing,
        padding_free=bool(args.padding_free),
        pad_to_multiple_of=args.pad_to_multiple_of,
        max_shapes=args.max_shapes,
        layout=layout,
        spec=spec,
        lengths=_lengths(*datasets),
    )


def _lengths(*datasets: Any) -> Iterator[int] | None:
    """Row lengths, read when they are needed; None where a stream has not told them."""
    sets = [rows for data in datasets for rows in (data.values() if isinstance(data, dict) else [data])]
    sets = [rows for rows in sets if rows is not None]
    if not all(hasattr(rows, "__len__") for rows in sets):
        return None
    return (len(row["input_ids"]) for rows in sets for row in rows)

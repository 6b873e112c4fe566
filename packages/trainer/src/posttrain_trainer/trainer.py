"""The training loop: one `transformers.Trainer` for every method."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from posttrain_losses import Metric
from posttrain_models import unwrap
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, has_length

from posttrain_trainer import card, evaluation
from posttrain_trainer.checks import check_arguments, check_objects
from posttrain_trainer.config import TrainingConfig, checkpointing_kwargs
from posttrain_trainer.exact import ExactTrainer
from posttrain_trainer.memory import offloaded_activations, use_selective_checkpointing
from posttrain_trainer.method import Anchor, Method, check_prepared, keyed, positions, token_count
from posttrain_trainer.plan import ShapePlan, ShapeWatch
from posttrain_trainer.ranks import compute, from_saved, merge, merge_packed, pack, placed, ratio, to_saved
from posttrain_trainer.sources import EvaluationSource, MapSource, StreamSource, is_batch_source, row_length

logger = logging.getLogger("posttrain")

TOKENS = " tokens"  # rides along with the counts, under a name that no method has
RESERVED = frozenset({"loss", "learning_rate", "grad_norm", "epoch", "step", "num_tokens", "train_loss"})


class Trainer(ExactTrainer):
    """`transformers.Trainer` for batches that are NamedTuples and methods that return sums and counts.

    It knows no method. The loss of an optimiser step is, for each key, the sum over all micro-batches and ranks divided
    by the count over all of them, so it does not depend on how the step's rows are split. The logged `loss` is the mean
    of that over the steps since the last log, `eval_loss` is the total sum over the total count of the data set.

    Metrics that the method returns merge over micro-batches, ranks and steps, and become numbers only when they are
    logged; `num_tokens` is the number of tokens trained on since the beginning, padding not counted.

    Rows come from a `MapSource` or a `StreamSource`, made of `train_dataset` and `data_collator`; a `train_dataset`
    that is itself a `BatchSource` is used as it is. Checkpoints hold all of a run's state: a run that is killed and
    resumed gives the same parameters and logs, bit for bit on a CPU.

    What transformers does with checkpoints, trackers, the hub, DeepSpeed, FSDP, TP and `torch_compile` is inherited.

    Args:
        model: The model, loaded.
        method: What is trained: see `Method`.
        args: The arguments; a plain `transformers.TrainingArguments` will do.
        data_collator: Makes a batch of a list of rows; with a static `shape_plan` it is called with `size=` too.
        train_dataset: Rows (map-style or iterable), or a `BatchSource`.
        eval_dataset: Rows, a `BatchSource`, or a dict of these, evaluated one by one as `eval_<name>_...`.
        processing_class: The tokenizer or processor, saved with the model.
        compute_metrics: Of predictions and labels, as in transformers; needs `method.predict`.
        callbacks: Callbacks; one with `state_dict` and `load_state_dict` is checkpointed.
        optimizers: An optimiser and a scheduler to use instead of those of `args`.
        optimizer_cls_and_kwargs: As in transformers.
        preprocess_logits_for_metrics: As in transformers.
        shape_plan: The shapes of the run, from `resolve_shapes`.
        method_name: For tags and the model card; the name of the method's class otherwise.

    Raises:
        ValueError: For arguments that contradict each other or that this trainer cannot honour, naming them.

    Example:
        >>> import tempfile, torch
        >>> from typing import NamedTuple
        >>> from posttrain_trainer import Trainer, TrainingConfig
        >>> class Points(NamedTuple):
        ...     x: torch.Tensor
        ...     y: torch.Tensor
        >>> class LeastSquares:
        ...     def count(self, batch):
        ...         return len(batch.y)
        ...     def loss(self, model, batch):
        ...         return ((model(batch.x) - batch.y) ** 2).sum(), {}
        >>> rows = [(float(i), 2.0 * i) for i in range(8)]
        >>> def collate(rows):
        ...     return Points(*(torch.tensor(column)[:, None] for column in zip(*rows)))
        >>> args = TrainingConfig(
        ...     tempfile.mkdtemp(), use_cpu=True, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        ...     num_train_epochs=20, learning_rate=0.1, save_strategy="no", logging_strategy="no",
        ... )
        >>> trainer = Trainer(torch.nn.Linear(1, 1), LeastSquares(), args, collate, rows)
        >>> _ = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> trainer.state.global_step
        20
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: Method,
        args: TrainingArguments | None = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        shape_plan: ShapePlan | None = None,
        method_name: str | None = None,
    ) -> None:
        args = TrainingConfig() if args is None else args
        check_arguments(method, args, data_collator, (train_dataset, eval_dataset), compute_metrics)
        check_objects(processing_class, callbacks, compute_metrics)
        if args.n_gpu > 1:
            logger.warning(
                "%d devices are visible to this one process, which trains on one of them; start one process for each "
                "(--nproc_per_node) to use all",
                args.n_gpu,
            )
            args._n_gpu = 1
        args.remove_unused_columns = False
        args.logging_nan_inf_filter = False
        self.method = method
        self.method_name = method_name or type(method).__name__
        self.shape_plan = shape_plan
        self.shape_watch: ShapeWatch | None = None
        self._reset_window()
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator if data_collator is not None else list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._check_parallelism()
        self.loss_is_scaled_for_ga = True
        self.tags = ["posttrain", self.method_name.lower()]
        if hasattr(unwrap(self.model), "add_model_tags"):
            unwrap(self.model).add_model_tags(self.tags)
        if self._fill:
            sizes = tuple(sorted({args.train_batch_size, args.eval_batch_size}))
            self.shape_plan = replace(shape_plan, batch_sizes=sizes)
            self.shape_watch = ShapeWatch(self.shape_plan).attach(self.model)

    def _check_parallelism(self) -> None:
        for name, size in (("cp_size", self.get_cp_size()), ("sp_size", self.get_sp_size())):
            if size > 1:
                raise ValueError(
                    f"parallelism_config {name}={size}: sequences cannot be split over ranks, because the sums and "
                    "counts of a batch are of whole sequences; use data, tensor or fully sharded parallelism"
                )

    # ---- Data ----

    def get_train_dataloader(self) -> Any:
        """The source of training batches."""
        data = self.train_dataset
        if data is None:
            raise ValueError("train_dataset is None: pass the rows to train on")
        if is_batch_source(data):
            self._source = data
            return data
        common: dict[str, Any] = {
            "batch_size": self._train_batch_size,
            "accumulation": self.args.gradient_accumulation_steps,
            "rank": self.ranks.index,
            "world": self.ranks.size,
            "seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
            "fill": self._fill,
        }
        if has_length(data) and hasattr(data, "__getitem__"):
            strategy = self.args.train_sampling_strategy
            self._source = MapSource(
                data,
                self.data_collator,
                shuffle=strategy != "sequential",
                drop_last=self.args.dataloader_drop_last,
                lengths=functools.partial(row_length, self.args.length_column_name)
                if strategy == "group_by_length"
                else None,
                **common,
            )
        else:
            buffer = getattr(self.args, "shuffle_buffer", 0)
            self._source = StreamSource(data, self.data_collator, buffer=buffer, **common)
        return self._source

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of an evaluation dataset, or of the one that is named."""
        if isinstance(eval_dataset, str):
            sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if eval_dataset not in sets:
                known = ", ".join(map(repr, sets)) or "none"
                raise ValueError(f"eval_dataset={eval_dataset!r} names no evaluation set; this trainer has {known}")
            eval_dataset = sets[eval_dataset]
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise ValueError("eval_dataset is None: pass the rows to evaluate, here or to the trainer")
        if is_batch_source(data):
            return data
        return EvaluationSource(
            data,
            self.data_collator,
            batch_size=self.args.eval_batch_size,
            rank=self.ranks.index,
            world=self.ranks.size,
            fill=self._fill,
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The batches of a dataset to predict."""
        return self.get_eval_dataloader(test_dataset)

    @property
    def _fill(self) -> bool:
        return self.shape_plan is not None and self.shape_plan.static

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of an optimiser step, prepared, and what each key's sum is multiplied by."""
        if self.args.enable_jit_checkpoint:
            self._drawn = (self.state.global_step, self._source.state_dict())
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return [], None
        if hasattr(self.method, "prepare"):
            batches = [self._prepare_input(batch) for batch in batches]
            self.model_wrapped.train()
            batches = check_prepared(batches, self.method.prepare(self.model_wrapped, batches))
            return batches, self._scales(batches)
        # Counted before they move: on the CPU it costs the device neither a kernel nor a wait.
        scales = self._scales(batches)
        return [self._prepare_input(batch) for batch in batches], scales

    def _scales(self, batches: list[Any]) -> dict[str, torch.Tensor]:
        """For each key: data-parallel size over the count of all micro-batches and ranks; 0 where that is 0.

        DDP, FSDP and ZeRO average gradients over the data-parallel ranks, which the size undoes.
        """
        counts: dict[str, Any] = {}
        for batch in batches:
            if isinstance(batch, Anchor):
                continue
            tokens = token_count(self.method, batch)
            found = keyed(self.method.count(batch))
            for key, value in (found if tokens is None else {**found, TOKENS: tokens}).items():
                counts[key] = counts.get(key, 0) + value
        totals = self.ranks.total_counts(counts)
        if TOKENS in totals:
            self._window_tokens = self._window_tokens + totals.pop(TOKENS)
        zero = torch.zeros((), device=self.args.device)
        return {
            key: torch.where(total > 0, self.ranks.size / total.clamp(min=1e-30), zero).float()
            for key, total in totals.items()
        }

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        return self._scales(batch_samples)

    def _prepare_input(self, data: Any) -> Any:
        """Moves tensors to the device; NamedTuples keep their type, floats their precision, None stays None."""
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device, non_blocking=True)
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*(self._prepare_input(value) for value in data))
        return super()._prepare_input(data)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self._prepare_input(inputs)

    def _prepare_context_parallel_inputs(self, model: torch.nn.Module, inputs: Any) -> Any:
        return contextlib.nullcontext, inputs

    # ---- Loss ----

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        options = checkpointing_kwargs(self.args)
        if options.pop("selective", False):
            use_selective_checkpointing(self.model, options)
        return super()._prepare_for_training(*args, **kwargs)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This rank's part of the step's loss, from one micro-batch.

        Args:
            model: The wrapped model.
            inputs: A batch, or an `Anchor`.
            return_outputs: Return the method's metrics too.
            num_items_in_batch: What `get_batch_samples` returned for the step; None takes the batch for a whole step.
        """
        scales = self._scales([inputs]) if num_items_in_batch is None else num_items_in_batch
        anchor = isinstance(inputs, Anchor)
        with self._offloading():
            sums, metrics = self.method.loss(model, inputs.batch if anchor else inputs)
        parts = []
        for key, value in keyed(sums).items():
            if key not in scales:
                raise ValueError(
                    f"method.loss returned a sum for {key!r}, method.count counts {sorted(scales)}: use the same keys"
                )
            parts.append(value.float() * (0.0 if anchor else scales[key]))
        loss = torch.stack(parts).sum()
        if model.training and not anchor:
            self._record(metrics)
        return (loss, metrics) if return_outputs else loss

    def _offloading(self) -> Any:
        if getattr(self.args, "activation_offloading", False) and self.args.device.type != "cpu":
            return offloaded_activations(self.model)
        return contextlib.nullcontext()

    # ---- Metrics ----

    def _reset_window(self) -> None:
        self._window: dict[str, Metric] = {}
        self._window_tokens: Any = 0
        self._tokens_seen: int | None = None
        self._window_due = False

    def _record(self, metrics: Any) -> None:
        if RESERVED & metrics.keys():
            name = sorted(RESERVED & metrics.keys())[0]
            raise ValueError(f"method.loss returned a metric named {name!r}, which the trainer logs itself: rename it")
        self._window = merge(self._window, metrics)

    def _count_tokens(self) -> int | None:
        """Tokens trained on so far; None if nothing counts them."""
        if isinstance(self._window_tokens, torch.Tensor):
            self._tokens_seen = (self._tokens_seen or 0) + int(self._window_tokens)
            self._window_tokens = 0
        return self._tokens_seen

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._window_due = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if isinstance(self._source, MapSource):
            # transformers counts micro-batches, of which a short last step has fewer: the same step of another split
            # would have another epoch.
            self.state.epoch = self.state.global_step / self._source.steps
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; with the training loss also the metrics since the last log, merged over ranks."""
        if self._window_due:
            self._window_due = False
            logs.update(compute(merge_packed(self.ranks.gather(pack(self._window)))))
            self._window = {}
            if (tokens := self._count_tokens()) is not None:
                logs["num_tokens"] = tokens
        super().log(logs, start_time)

    def _progress(self) -> dict[str, Any]:
        return {**super()._progress(), "tokens": self._count_tokens(), "metrics": to_saved(pack(self._window))}

    def _load_progress(self, saved: list[dict[str, Any]]) -> None:
        super()._load_progress(saved)
        self._tokens_seen = saved[0]["tokens"]
        parts = [from_saved(one["metrics"]) for one in saved]
        # With another number of ranks the first one carries the window of all.
        window = merge_packed(parts) if len(parts) == 1 or self.ranks.index == 0 else {}
        self._window = placed(window, self.args.device)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains: see `ExactTrainer.train`."""
        self._reset_window()
        return super().train(*args, **kwargs)

    # ---- Counters ----

    @functools.cached_property
    def _flops_per_token(self) -> int:
        inner = unwrap(self.model)
        return 6 * inner.num_parameters(exclude_embeddings=True) if hasattr(inner, "num_parameters") else 0

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of forward and backward, padding included."""
        return self._flops_per_token * positions(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        which = self.args.include_num_input_tokens_seen
        if which == "no":
            return
        tokens: Any = positions(inputs)
        if which == "non_padding" and not isinstance(inputs, Anchor):
            counted = token_count(self.method, inputs)
            tokens = tokens if counted is None else counted
        total = self.ranks.total(torch.as_tensor(tokens, device=self.args.device, dtype=torch.int64))
        self.state.num_input_tokens_seen += int(total)

    # ---- Evaluation ----

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluates every row once; the loss is the total sum over the total count."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self._evaluation_model()
        model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        predict = not loss_only and hasattr(self.method, "predict")
        logger.info("***** Running %s *****", description)
        return evaluation.run(self, model, dataloader, predict=predict, prefix=metric_key_prefix)

    def _evaluation_model(self) -> torch.nn.Module:
        """The model as transformers prepares it when evaluation comes before or after training."""
        if self.is_deepspeed_enabled and self.deepspeed is None:
            from transformers.integrations.deepspeed import deepspeed_init

            deepspeed_init(self, num_training_steps=0, inference=True)
        model = self._wrap_model(self.model, training=False)
        if len(self.accelerator._models) == 0 and model is self.model:
            if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.args.torch_compile):
                model = self.accelerator.prepare(model)
            else:
                model = self.accelerator.prepare_model(model, evaluation_mode=True)
            if self.is_fsdp_enabled:
                self.model = model
            if model is not self.model:
                self.model_wrapped = model
            if self.is_deepspeed_enabled:
                self.deepspeed = self.model_wrapped
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            model = model.to(dtype=dtype, device=self.args.device)
        return model

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch, as if it were all the data."""
        batch = self._prepare_inputs(inputs)
        with torch.no_grad():
            found = evaluation.evaluate_batch(self, model, batch)
            logits, labels = None, None
            if not prediction_loss_only and hasattr(self.method, "predict"):
                logits, labels = self.method.predict(model, batch)
        counts = {key: float(value) for key, value in found.counts.items()}
        loss = ratio({key: [float(value)] for key, value in found.sums.items()}, counts)
        return torch.tensor(loss), logits, labels

    # ---- Model card ----

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.save_extras(Path(output_dir or self.args.output_dir))

    def save_extras(self, folder: Path) -> None:
        """Writes what belongs beside the weights, with every checkpoint and every saved model.

        Here it is the model card. An app that has more to save overrides this and calls it.

        Args:
            folder: The folder that holds the weights.
        """
        (folder / "README.md").write_text(self.model_card(), encoding="utf-8")

    def model_card(self) -> str:
        """The text of the model card."""
        return card.model_card(
            name=self.hub_model_id or Path(self.args.output_dir).name,
            method=self.method_name,
            base=card.base_name(self.model),
            dataset=card.dataset_name(self.train_dataset),
            adapter=hasattr(unwrap(self.model), "peft_config"),
            task=card.task(self.model),
            tags=self.tags,
        )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the model card to `output_dir`."""
        if self.is_world_process_zero():
            (Path(self.args.output_dir) / "README.md").write_text(self.model_card(), encoding="utf-8")

"""Evaluation as total over total, the same on any number of ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, has_length

from posttrain_trainer.method import Anchor, check_prepared, keyed
from posttrain_trainer.ranks import Ranks, compute, merge_packed, pack, ratio


@dataclass
class Round:
    """What one rank found in one batch; empty for an anchor."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


def run(trainer: Any, model: torch.nn.Module, source: Any, *, predict: bool, prefix: str) -> EvalLoopOutput:
    """Evaluates every batch of a source once.

    Sums and counts are added over all batches of all ranks before they are divided, in an order that does not depend
    on the number of ranks.

    Args:
        trainer: The trainer, for its method, metrics and callbacks.
        model: The model, prepared for evaluation.
        source: This rank's batches.
        predict: Whether predictions are wanted besides the loss.
        prefix: Of the metric names.

    Returns:
        Metrics, and predictions and labels if they were wanted.
    """
    ranks: Ranks = trainer.ranks
    rounds: list[Round] = []
    predictions = Predictions(trainer, ranks)
    with torch.no_grad():
        for batch in _prepared(trainer, model, source):
            rounds.append(evaluate_batch(trainer, model, batch))
            if predict:
                predictions.add(model, batch)
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    loss, metrics = _reduce(ranks, rounds)
    metrics = {"loss": loss, **metrics, **predictions.metrics()}
    metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}
    if hasattr(trainer, "model_preparation_time"):
        metrics[f"{prefix}_model_preparation_time"] = trainer.model_preparation_time
    rows = getattr(source, "dataset", None)
    samples = len(rows) if rows is not None and has_length(rows) else len(rounds) * trainer.args.eval_batch_size
    return EvalLoopOutput(predictions.logits, predictions.labels, denumpify_detensorize(metrics), samples)


def _prepared(trainer: Any, model: torch.nn.Module, source: Iterable[Any]) -> Iterator[Any]:
    """Batches on the device; all at once if the method has to see them together."""
    if not hasattr(trainer.method, "prepare"):
        return map(trainer._prepare_input, source)
    batches = [trainer._prepare_input(batch) for batch in source]
    return iter(check_prepared(batches, trainer.method.prepare(model, batches)))


def evaluate_batch(trainer: Any, model: torch.nn.Module, batch: Any) -> Round:
    """Sums, counts and metrics of one batch."""
    real = batch.batch if isinstance(batch, Anchor) else batch
    with trainer.compute_loss_context_manager():
        sums, metrics = trainer.method.loss(model, real)
    if isinstance(batch, Anchor):
        return Round()
    sums = {key: torch.as_tensor(value).detach().float() for key, value in keyed(sums).items()}
    return Round(sums, keyed(trainer.method.count(real)), dict(metrics))


def _reduce(ranks: Ranks, rounds: list[Round]) -> tuple[float, dict[str, float]]:
    mine = []
    for one in rounds:
        sums = {key: float(value) for key, value in one.sums.items()}
        mine.append((sums, {key: float(value) for key, value in one.counts.items()}, pack(one.metrics)))
    # Batch r of round i is batch i * size + r of the whole, whatever the number of ranks.
    ordered = list(chain.from_iterable(zip(*ranks.gather(mine), strict=True)))
    totals: dict[str, list[float]] = {}
    counts: dict[str, float] = {}
    for sums, counted, _ in ordered:
        for key, value in sums.items():
            totals.setdefault(key, []).append(value)
        for key, value in counted.items():
            counts[key] = counts.get(key, 0.0) + value
    return ratio(totals, counts), compute(merge_packed(packed for _, _, packed in ordered))


class Predictions:
    """Predictions and labels of all ranks, in row order, and what `compute_metrics` makes of them.

    Args:
        trainer: For its method and its functions.
        ranks: The ranks to gather from.
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self.trainer, self.ranks = trainer, ranks
        self.logits: Any = None
        self.labels: Any = None
        self.inputs: Any = None
        self.result: dict[str, float] = {}
        self.pending: Any = None

    def add(self, model: torch.nn.Module, batch: Any) -> None:
        """Predicts a batch on each rank and keeps the rows of all of them."""
        real = batch.batch if isinstance(batch, Anchor) else batch
        with self.trainer.compute_loss_context_manager():
            logits, labels = nested_detach(self.trainer.method.predict(model, real))
        if self.trainer.preprocess_logits_for_metrics is not None:
            logits = self.trainer.preprocess_logits_for_metrics(logits, labels)
        inputs = getattr(real, "input_ids", None) if "inputs" in self.trainer.args.include_for_metrics else None
        found = None if isinstance(batch, Anchor) else tuple(to_numpy(value) for value in (logits, labels, inputs))
        for part in self.ranks.gather(found):
            if part is not None:
                self._keep(*part)

    def _keep(self, logits: Any, labels: Any, inputs: Any) -> None:
        if self.trainer.args.batch_eval_metrics and self.trainer.compute_metrics is not None:
            # One behind, because only the caller knows which batch is the last.
            self._compute_batch(last=False)
            self.pending = (logits, labels, inputs)
            return
        self.logits = joined(self.logits, logits)
        self.labels = joined(self.labels, labels)
        self.inputs = joined(self.inputs, inputs)

    def _compute_batch(self, last: bool) -> None:
        if self.pending is None:
            return
        logits, labels, inputs = self.pending
        prediction = EvalPrediction(predictions=logits, label_ids=labels, inputs=inputs)
        self.result = self.trainer.compute_metrics(prediction, compute_result=last) or {}

    def metrics(self) -> dict[str, float]:
        """What `compute_metrics` returned."""
        if self.trainer.args.batch_eval_metrics:
            self._compute_batch(last=True)
        elif self.trainer.compute_metrics is not None and self.logits is not None:
            prediction = EvalPrediction(predictions=self.logits, label_ids=self.labels, inputs=self.inputs)
            self.result = self.trainer.compute_metrics(prediction)
        return self.result


def to_numpy(value: Any) -> Any:
    """Arrays of a nested structure of tensors; bfloat16 becomes float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, list | tuple):
        return tuple(to_numpy(item) for item in value)
    return value


def joined(old: Any, new: Any) -> Any:
    """Rows of both, padded on the right with -100 where widths differ."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(new, np.ndarray) and new.ndim == 0:
        return np.append(np.atleast_1d(old), new)
    return nested_concat(old, new, padding_index=-100)

"""What a method tells the trainer: how many items a batch holds, and the sum of their losses."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from posttrain_collators import CompletionBatch
from posttrain_losses import Metric

Number = float | torch.Tensor


class Anchor(NamedTuple):
    """A micro-batch that keeps a rank in step while it has no rows of its own.

    When an optimiser step has fewer rows than ranks, a rank without rows still has to run as many forwards and
    backwards as the others, or collectives hang. It runs `batch`, a copy of some other rank's rows, with its sums
    multiplied by 0, its count taken as 0 and its metrics ignored.

    `Method.prepare` sees anchors as they are: it prepares `anchor.batch` like any other batch, returns it wrapped in
    an `Anchor` again, and leaves its rows out of every sum it makes.

    Attributes:
        batch: A batch that `Method.loss` can run.

    Example:
        >>> from posttrain_trainer import Anchor
        >>> Anchor("rows of another rank").batch
        'rows of another rank'
    """

    batch: Any


@runtime_checkable
class Method(Protocol):
    """A training method: a loss as sums, and the counts that the sums are divided by.

    The trainer computes, over all micro-batches `b` and all ranks of an optimiser step,

        loss = sum over keys k of  (sum_b sums_k(b)) / (sum_b counts_k(b))

    so that one batch of 32, four of 8 and eight of 4 give the same loss and gradient. A key whose counts sum to 0
    contributes 0. No other normaliser exists: a method returns sums and never divides by a batch size.

    A method may have three more members:

    * `prepare(model, batches) -> batches`: called with all micro-batches of an optimiser step (of an evaluation: with
      all its batches), on the device, before any backward, on every rank equally often. It returns as many batches
      in the same order. Elements may be `Anchor`s. What depends on rows of other micro-batches or ranks is computed
      here, and reduced over ranks here.
    * `predict(model, batch) -> (logits, labels)`: what `compute_metrics` and `Trainer.predict` receive, row by row.
    * `tokens(batch) -> int`: tokens that are not padding, for `num_tokens`. Without it, a batch that has
      `segment_ids` counts those above 0, and a `CompletionBatch` its prompts once and all their completions, in every
      layout alike; filler rows are not counted.

    Example:
        >>> import torch
        >>> from typing import NamedTuple
        >>> from posttrain_trainer import Method
        >>> class Points(NamedTuple):
        ...     x: torch.Tensor
        ...     y: torch.Tensor
        >>> class LeastSquares:
        ...     def count(self, batch):
        ...         return len(batch.y)
        ...     def loss(self, model, batch):
        ...         return ((model(batch.x) - batch.y) ** 2).sum(), {}
        >>> isinstance(LeastSquares(), Method)
        True
    """

    def count(self, batch: Any) -> Number | Mapping[str, Number]:
        """Items of the batch that the loss averages over; looks at the batch alone.

        Args:
            batch: One micro-batch, as the collator or the batch source made it.

        Returns:
            A number, or one number for each key of the loss, the same keys for every batch.
        """
        ...

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Mapping[str, Metric]]:
        """The sum of the batch's losses.

        Args:
            model: The model, wrapped as training needs it: call it, do not reach into it.
            batch: One micro-batch on the device.

        Returns:
            The differentiable sum (a scalar, or one for each key of `count`), and metrics by name.
        """
        ...


SINGLE = "loss"


def keyed(value: Any) -> dict[str, Any]:
    """A count or a sum by key; a bare number has the key `loss`."""
    return dict(value) if isinstance(value, Mapping) else {SINGLE: value}


def token_count(method: Any, batch: Any) -> Number | None:
    """Tokens of the batch that are not padding, or None when neither method nor batch says."""
    if hasattr(method, "tokens"):
        return method.tokens(batch)
    if isinstance(batch, CompletionBatch):
        there = batch.completion_mask.flatten(1)  # (P, G * Tc)
        return (batch.prompt_mask & there.any(1, keepdim=True)).sum() + there.sum()
    segments = getattr(batch, "segment_ids", None)
    return None if segments is None else (segments > 0).sum()


def check_prepared(before: Sequence[Any], after: Any) -> list[Any]:
    """What `prepare` returned, as a list.

    Raises:
        ValueError: If batches are missing, or an `Anchor` did not stay one.
    """
    after = list(after)
    if len(after) != len(before):
        raise ValueError(
            f"method.prepare returned {len(after)} batches for {len(before)}: return one for each, in order"
        )
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if isinstance(old, Anchor) != isinstance(new, Anchor):
            raise ValueError(
                f"method.prepare: batch {index} went in as {type(old).__name__} and came back as {type(new).__name__}: "
                "prepare an Anchor's .batch and return it as Anchor(batch)"
            )
    return after


def positions(batch: Any) -> int:
    """Positions that the model computes: those of `input_ids`, or of every tensor of token ids.

    Of a `CompletionBatch` each prompt counts once, whatever the layout, so runs in different layouts compare.
    """
    if isinstance(batch, Anchor):
        return 0
    ids = getattr(batch, "input_ids", None)
    if ids is not None:
        return ids.numel()
    fields = batch if isinstance(batch, tuple) else ()
    tensors = [value for value in fields if isinstance(value, torch.Tensor)]
    return sum(value.numel() for value in tensors if value.dtype == torch.int64 and value.ndim > 1)

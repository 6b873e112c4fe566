"""Kahneman-Tversky optimisation as a method: what a batch's loss sum is, and how many completions it averages over."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from posttrain_app.methods import balancing_term, carried_or_computed, real, scored
from posttrain_collators import CompletionBatch
from posttrain_losses import Mean, Metric
from posttrain_losses.preference import kto_loss
from posttrain_models import completion_logps, score_completions
from posttrain_models.references import Reference
from posttrain_trainer import Anchor
from posttrain_trainer.ranks import Ranks
from torch import Tensor
from torch.nn import functional

from posttrain_kto.mismatch import inner, mismatched

logger = logging.getLogger("posttrain")


class KTOExtras(NamedTuple):
    """What `KTO.prepare` makes of a batch's `FeedbackExtras`.

    Attributes:
        labels: `(P,)` bool, whether the completion is desirable.
        reference_logps: `(P, 1, Tc)` float32; None where they are still to be computed.
        kl: `(P,)` float32, the reference point of the optimiser step, the same for every row.
    """

    labels: Tensor
    reference_logps: Tensor | None
    kl: Tensor


class Margin(Metric):
    """The mean of desirable values less the mean of undesirable ones; `state` is their totals and counts."""

    size = 4

    @classmethod
    def between(cls, values: Tensor, labels: Tensor, mask: Tensor) -> "Margin":
        """The metric of `values`, `labels` and `mask`, all `(P,)`."""
        good, bad = Mean.of(values, mask & labels).state, Mean.of(values, mask & ~labels).state
        return cls(torch.cat([good, bad]))

    @classmethod
    def _measure(cls, values: Tensor, mask: Tensor) -> Tensor:
        return cls.between(values, torch.ones_like(mask), mask).state

    @classmethod
    def _merge(cls, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def _count(state: Tensor) -> float:
        return min(state[1].item(), state[3].item())

    @staticmethod
    def _value(state: Tensor) -> float:
        return (state[0] / state[1] - state[2] / state[3]).item()


@dataclass(frozen=True)
class KTO:
    r"""Losses of single completions that are labelled desirable or not, under a policy $\pi$ and a reference.

    With R the rows of an optimiser step, over all its micro-batches and ranks, $l = \log\pi(y \mid x) -
    \log\pi_\text{ref}(y \mid x)$ the log-ratio of a completion's tokens, and z the reference point:

    $$L = \frac{1}{|R|} \sum_R w_d (1 - \sigma(\beta (l - z))) \text{ if desirable, } w_u (1 - \sigma(\beta (z - l)))
      \text{ otherwise}$$

    (Ethayarajh et al., arXiv 2402.01306). z estimates how far the policy is from the reference: the mean of l over all
    rows of the step, each prompt with the completion of another row, not below 0, and constant for the gradient.
    `prepare` computes it. A row gets the completion of the nearest row before it, in the order of the step, whose
    prompt is another one; the first rows get those of the last. So it does not matter how a step is split, and a step
    with one row, or with one prompt alone, has z = 0.

    Args:
        loss_function: `kto_loss`, or `apo_zero_unpaired`, which has no z.
        beta: strength of the reference.
        desirable_weight: $w_d$.
        undesirable_weight: $w_u$.
        reference: what the policy is compared with; None where rows carry the reference's log-probabilities and there
            is no z.
        share_prompts: ask the reference about a row's own completion and the other one at once, which saves time where
            the model computes a prompt once for its completions.
        ranks: returns the `Ranks` that share the rows of a step; by default all processes of `torch.distributed`.
        router_aux_loss_coef: coefficient of a mixture-of-experts model's load-balancing loss, a micro-batch at a time.

    Example:
        >>> from posttrain_collators import FeedbackCollator
        >>> from posttrain_models import tiny_model
        >>> from posttrain_models.references import make_reference
        >>> rows = [{"prompt_ids": [5], "completion_ids": [7, 8], "label": True},
        ...         {"prompt_ids": [6], "completion_ids": [9], "label": False}]
        >>> model = tiny_model("llama", vocab_size=16)
        >>> method = KTO(reference=make_reference(model))
        >>> (batch,) = method.prepare(model, [FeedbackCollator(0)(rows)])
        >>> sums, metrics = method.loss(model, batch)
        >>> int(method.count(batch)["loss"]), round(float(sums["loss"]), 4)
        (2, 1.0)
    """

    loss_function: Callable[..., Tensor] = kto_loss
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: Reference | None = None
    share_prompts: bool = False
    ranks: Callable[[], Ranks] | None = None
    router_aux_loss_coef: float = 0.0

    needs_reference = True

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference is asked about pairs that no row can carry."""
        return self.loss_function is kto_loss

    def count(self, batch: CompletionBatch) -> dict[str, Tensor | int]:
        """Completions under "loss", and micro-batches under "aux_loss"."""
        counts: dict[str, Tensor | int] = {"loss": real(batch).sum()}
        if self.router_aux_loss_coef:
            counts["aux_loss"] = 1
        return counts

    @torch.no_grad()
    def prepare(self, model: torch.nn.Module, batches: Sequence[Any]) -> list[Any]:
        """The batches with z, and the reference's log-probabilities where they were computed on the way."""
        if not self.keeps_reference:
            return list(batches)
        ranks = (self.ranks or all_ranks)()
        others = mismatched(batches, ranks)
        found = [self._ratios(model, inner(batch), other) for batch, other in zip(batches, others, strict=True)]
        values = [value for rank in ranks.gather([ratios for ratios, _ in found]) for batch in rank for value in batch]
        if not values:
            logger.warning("kl is 0: a step needs rows of two different prompts to estimate it; use a larger batch")
        kl = max(math.fsum(values) / len(values), 0.0) if values else 0.0
        return [_with(batch, kl, logps) for batch, (_, logps) in zip(batches, found, strict=True)]

    def _ratios(
        self, model: torch.nn.Module, batch: CompletionBatch, other: CompletionBatch
    ) -> tuple[list[float], Tensor | None]:
        """The log-ratios of the rows that got another completion, and what the reference says of their own."""
        if self.reference is None:
            raise ValueError("reference is None: the KL term of kto needs one, whatever the rows carry.")
        carried = batch.extras.reference_logps
        policy = completion_logps(model, other)  # (P, 1, To)
        if carried is None and self.share_prompts:
            own, reference = self._both(model, batch, other)
        else:
            own, reference = carried, self.reference.logps(model, other)
        mask = scored(other)
        ratios = ((policy - reference) * mask).sum((1, 2))[real(other)]
        return ratios.tolist(), own

    def _both(self, model: torch.nn.Module, batch: CompletionBatch, other: CompletionBatch) -> tuple[Tensor, Tensor]:
        """The reference's log-probabilities of both completions of each row, its prompt computed once."""
        widths = batch.completions.shape[-1], other.completions.shape[-1]

        def joined(name: str) -> Tensor:  # (P, 2, T)
            parts = zip((batch, other), widths, strict=True)
            return torch.cat([functional.pad(getattr(one, name), (0, max(widths) - width)) for one, width in parts], 1)

        completions, mask = joined("completions"), joined("completion_mask")
        both = CompletionBatch(batch.prompts, batch.prompt_mask, completions, mask)
        logps = self.reference.logps(model, both)
        return logps[:, :1, : widths[0]], logps[:, 1:, : widths[1]]

    def loss(self, model: torch.nn.Module, batch: CompletionBatch) -> tuple[dict[str, Tensor], dict[str, Metric]]:
        """The sum of the losses over the completions of `batch`, and what they are worth."""
        if self.keeps_reference and not isinstance(batch.extras, KTOExtras):
            (batch,) = self.prepare(model, [batch])
        scores = score_completions(model, batch, entropy=True, mean_logit=True)
        mask, there, labels = scored(batch), real(batch), batch.extras.labels
        ratios, logps = self._own_ratios(model, batch, scores.logps, mask)  # (P,)
        kl = batch.extras.kl if self.keeps_reference else torch.zeros_like(ratios)
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        values = self.loss_function(ratios, labels, kl, beta=self.beta, **weights)
        sums = {"loss": torch.where(there, values, 0.0).sum()}
        rewards = self.beta * ratios.detach()
        metrics: dict[str, Metric] = {
            "rewards/margins": Margin.between(rewards, labels, there),
            "rewards/accuracies": Mean.of((ratios > kl) == labels, there),
            "entropy": Mean.of(scores.entropy, mask),
        }
        if self.keeps_reference:
            metrics["kl"] = Mean.of(kl, there)
        for name, which in (("chosen", there & labels), ("rejected", there & ~labels)):
            metrics[f"rewards/{name}"] = Mean.of(rewards, which)
            metrics[f"logps/{name}"] = Mean.of(logps, which)
            if scores.mean_logit is not None:  # models that cap their logits have none
                metrics[f"logits/{name}"] = Mean.of(scores.mean_logit, mask & which[:, None, None])
        balance, balance_metrics = balancing_term(self.router_aux_loss_coef, scores.aux_loss)
        return {**sums, **balance}, {**metrics, **balance_metrics}

    def _own_ratios(
        self, model: torch.nn.Module, batch: CompletionBatch, logps: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-ratio and log-probability `(P,)` of each row's own completion."""
        reference = carried_or_computed(self.reference, model, batch)
        totals = (logps * mask).sum((1, 2))
        return totals - (reference * mask).sum((1, 2)), totals

    def predict(self, model: torch.nn.Module, batch: CompletionBatch) -> tuple[Tensor, Tensor]:
        """Rewards `(P,)` and whether the completion is desirable, for `compute_metrics`."""
        ratios, _ = self._own_ratios(model, batch, completion_logps(model, batch), scored(batch))
        keep = real(batch)
        return self.beta * ratios[keep], batch.extras.labels[keep].long()


def _with(batch: Any, kl: float, logps: Tensor | None) -> Any:
    if isinstance(batch, Anchor):
        return Anchor(_with(batch.batch, kl, logps))
    labels = batch.extras.labels
    filled = torch.full(labels.shape, kl, dtype=torch.float32, device=labels.device)
    return batch._replace(extras=KTOExtras(labels, logps, filled))


def all_ranks() -> Ranks:
    """All processes of `torch.distributed`, each with rows of its own."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Ranks(0, 1, 1, torch.device("cpu"))
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), 1, torch.device("cpu"))

"""Direct preference optimisation as a method: what a batch's loss sum is, and how many pairs it averages over."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from posttrain_app.methods import balancing_term, carried_or_computed, real, real_of, scored
from posttrain_collators import CompletionBatch
from posttrain_losses import Mean
from posttrain_losses.preference import Pairs, length_desensitised_sum, sft, sigmoid, simpo, wpo_weights
from posttrain_models import score_completions
from posttrain_models.references import Reference
from torch import Tensor

WITHOUT_REFERENCE = (sft, simpo)


def function_of(loss: Callable) -> Callable:
    """The function itself, where some of its options are set."""
    return loss.func if isinstance(loss, partial) else loss


@dataclass(frozen=True)
class DPO:
    r"""Losses of preference pairs under a policy $\pi$ and a reference, added with weights.

    With R the pairs of an optimiser step, over all its micro-batches and ranks, and $l = \log\pi(y \mid x) -
    \log\pi_\text{ref}(y \mid x)$ the log-ratio of the tokens of a completion, the loss of `sigmoid` alone is

    $$L = -\frac{1}{|R|} \sum_R \log\sigma(\beta (l_c - l_r))$$

    (Rafailov et al., arXiv 2305.18290). Losses are those of `posttrain_losses.preference`, or functions like them.
    `sft` averages over the tokens of the chosen completions, all others over pairs. `aot` and `aot_unpaired` compare
    the rows of a micro-batch, so they alone depend on how a step is split.

    Args:
        losses: functions `loss(pairs, beta) -> (P,)`, each with its weight.
        beta: strength of the reference.
        reference: what the policy is compared with; None where rows carry the reference's log-probabilities, and for
            losses that need none (`simpo`, `sft`).
        ld_alpha: weight of the tokens of a completion past the length of the shorter one of its pair (LD-DPO).
        use_weighting: weigh every pair by how likely the policy is to write it itself (WPO).
        router_aux_loss_coef: coefficient of a mixture-of-experts model's load-balancing loss, a micro-batch at a time.

    Example:
        >>> from posttrain_collators import PreferenceCollator
        >>> from posttrain_models import tiny_model
        >>> from posttrain_models.references import make_reference
        >>> batch = PreferenceCollator(0)([{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}])
        >>> model = tiny_model("llama", vocab_size=16)
        >>> method = DPO(reference=make_reference(model))
        >>> sums, metrics = method.loss(model, batch)
        >>> int(method.count(batch)["loss"]), round(float(sums["loss"]), 6)
        (1, 0.693147)
    """

    losses: tuple[tuple[Callable[..., Tensor], float], ...] = ((sigmoid, 1.0),)
    beta: float = 0.1
    reference: Reference | None = None
    ld_alpha: float | None = None
    use_weighting: bool = False
    router_aux_loss_coef: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether one of the losses compares policy and reference."""
        return any(function_of(loss) not in WITHOUT_REFERENCE for loss, _ in self.losses)

    def count(self, batch: CompletionBatch) -> dict[str, Tensor | int]:
        """Pairs under "loss"; tokens of the chosen completions under "sft", and micro-batches under "aux_loss"."""
        counts: dict[str, Tensor | int] = {}
        for key, _, _ in self._terms():
            counts[key] = scored(batch)[:, 0].sum() if key == "sft" else real(batch).sum()
        if self.router_aux_loss_coef:
            counts["aux_loss"] = 1
        return counts

    def _terms(self) -> list[tuple[str, Callable[..., Tensor], float]]:
        return [("sft" if function_of(loss) is sft else "loss", loss, weight) for loss, weight in self.losses]

    def loss(self, model: torch.nn.Module, batch: CompletionBatch) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """The sums of the losses over the pairs of `batch`, and what the pairs are worth."""
        scores = score_completions(model, batch, entropy=True, mean_logit=True, collision=self.use_weighting)
        mask, there = scored(batch), real(batch)  # (P, 2, Tc), (P,)
        reference = self.reference_logps(model, batch) if self.needs_reference else None  # (P, 2, Tc)
        pairs = self._pairs(scores.logps, reference, mask)
        weights = wpo_weights(scores.logps, scores.collision, mask) if self.use_weighting else None
        sums: dict[str, Tensor] = {}
        for key, loss, weight in self._terms():
            values = loss(self._pairs(scores.logps, None, mask, 1.0) if key == "sft" else pairs, self.beta)  # (P,)
            values = values if key == "sft" or weights is None else values * weights
            sums[key] = sums.get(key, 0.0) + weight * torch.where(there, values, 0.0).sum()
        metrics = self._metrics(scores, pairs, mask, there)
        balance, balance_metrics = balancing_term(self.router_aux_loss_coef, scores.aux_loss)
        return {**sums, **balance}, {**metrics, **balance_metrics}

    def reference_logps(self, model: torch.nn.Module, batch: CompletionBatch) -> Tensor:
        """Log-probabilities `(P, 2, Tc)` under the reference: those that the rows carry, or computed.

        Raises:
            ValueError: There are neither.
        """
        return carried_or_computed(self.reference, model, batch)

    def _pairs(self, logps: Tensor, reference: Tensor | None, mask: Tensor, alpha: float | None = None) -> Pairs:
        """Sums over the tokens of each completion; their lengths."""
        alpha = self.ld_alpha if alpha is None else alpha
        shared = mask.sum(-1).amin(-1, keepdim=True)  # (P, 1)
        plain = alpha is None or alpha == 1

        def total(values: Tensor) -> tuple[Tensor, ...]:
            values = values.sum(-1) if plain else length_desensitised_sum(values, mask, shared, alpha)
            return values.unbind(1)

        none = (None, None)
        lengths = torch.where(real_of(mask)[:, None], mask.sum(-1), 0)
        return Pairs(*total(logps), *(none if reference is None else total(reference)), *lengths.unbind(1))

    def _metrics(self, scores: Any, pairs: Pairs, mask: Tensor, there: Tensor) -> dict[str, Mean]:
        if self.needs_reference:
            chosen, rejected = pairs.ratios()
        else:
            chosen, rejected = pairs.per_token(*pairs.logps())
        chosen, rejected = self.beta * chosen.detach(), self.beta * rejected.detach()
        sums = (scores.logps.detach() * mask).sum(-1)  # (P, 2)
        mask = mask & there[:, None, None]
        metrics = {
            "rewards/chosen": Mean.of(chosen, there),
            "rewards/rejected": Mean.of(rejected, there),
            "rewards/accuracies": Mean.of(chosen > rejected, there),
            "rewards/margins": Mean.of(chosen - rejected, there),
            "logps/chosen": Mean.of(sums[:, 0], there),
            "logps/rejected": Mean.of(sums[:, 1], there),
            "entropy": Mean.of(scores.entropy, mask),
            "mean_token_accuracy": Mean.of(scores.top1[:, 0], mask[:, 0]),
        }
        if scores.mean_logit is not None:  # models that cap their logits have none
            metrics["logits/chosen"] = Mean.of(scores.mean_logit[:, 0], mask[:, 0])
            metrics["logits/rejected"] = Mean.of(scores.mean_logit[:, 1], mask[:, 1])
        return metrics

    def predict(self, model: torch.nn.Module, batch: CompletionBatch) -> tuple[Tensor, Tensor]:
        """Rewards `(P, 2)` of chosen and rejected, and the index of the better one (0), for `compute_metrics`."""
        logps, mask = score_completions(model, batch).logps, scored(batch)
        reference = self.reference_logps(model, batch) if self.needs_reference else None
        pairs = self._pairs(logps, reference, mask)
        rewards = pairs.ratios() if self.needs_reference else pairs.per_token(*pairs.logps())
        keep = real(batch)
        return self.beta * torch.stack(rewards, 1)[keep], torch.zeros_like(keep[keep], dtype=torch.long)

"""Reward modelling as a method: what a batch's loss sum is, and how many pairs it averages over."""

from dataclasses import dataclass

import torch
from posttrain_collators import CompletionBatch
from posttrain_losses import Max, Mean, Metric, Min
from posttrain_losses.preference import bradley_terry_loss, reward_centering
from posttrain_models.rewards import completion_scores


@dataclass(frozen=True)
class Reward:
    r"""Negative log-likelihood of the preferences under the Bradley-Terry model, over the pairs of a step.

    With `N` the pairs of an optimiser step, over all its micro-batches and ranks, and `r` the reward of a completion
    given its prompt:

    $$L = \frac{1}{N} \sum_i -\log \sigma(r_i^+ - r_i^- - m_i) + c\,(r_i^+ + r_i^-)^2$$

    `m` is the pair's margin, 0 where the rows have none (Ouyang et al., https://arxiv.org/abs/2203.02155; margins:
    https://arxiv.org/abs/2307.09288). The second term, with `c = center_rewards_coefficient`, keeps rewards around 0
    (https://arxiv.org/abs/2312.09244).

    Args:
        center_rewards_coefficient: `c`; 0 leaves the term out.

    Example:
        >>> from posttrain_collators import PreferenceCollator
        >>> from posttrain_models.rewards import tiny_reward_model
        >>> batch = PreferenceCollator(0)([{"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9]}])
        >>> method = Reward()
        >>> int(method.count(batch))
        1
        >>> total, metrics = method.loss(tiny_reward_model("llama", vocab_size=16), batch)
        >>> total.requires_grad, sorted(metrics)
        (True, ['accuracy', 'margin', 'max_reward', 'mean_reward', 'min_reward'])
    """

    center_rewards_coefficient: float = 0.0

    def count(self, batch: CompletionBatch) -> torch.Tensor:
        """The number of pairs: rows of which both completions have a token."""
        return pairs(batch).sum()

    def loss(self, model: torch.nn.Module, batch: CompletionBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The loss sum over the pairs of `batch`, with what the same rewards show."""
        rewards, there = completion_scores(model, batch), pairs(batch)
        chosen, rejected = rewards.unbind(1)
        losses = bradley_terry_loss(chosen, rejected, getattr(batch.extras, "margins", None))
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * reward_centering(chosen, rejected)
        both = there[:, None].expand_as(rewards)
        metrics = {
            "accuracy": Mean.of(chosen > rejected, there),
            "margin": Mean.of(chosen - rejected, there),
            "mean_reward": Mean.of(rewards, both),
            "min_reward": Min.of(rewards, both),
            "max_reward": Max.of(rewards, both),
        }
        return torch.where(there, losses, 0.0).sum(), metrics

    def predict(self, model: torch.nn.Module, batch: CompletionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards `(P, 2)`, chosen first, and which of the two is better: 0 everywhere. For `compute_metrics`."""
        rewards = completion_scores(model, batch)
        return rewards, rewards.new_zeros(len(rewards), dtype=torch.long)


def pairs(batch: CompletionBatch) -> torch.Tensor:
    """Which rows hold a pair and not a filler `(P,)`."""
    return batch.completion_mask.any(-1).all(-1)

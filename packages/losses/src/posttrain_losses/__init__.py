"""Losses for post-training language models, as functions of tensors, and the logit-free head."""

from posttrain_losses.head import TokenScores, WeightedSum, token_scores, weighted_logp_sum

__all__ = ["TokenScores", "WeightedSum", "token_scores", "weighted_logp_sum"]

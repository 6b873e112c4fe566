"""Losses for post-training language models, as functions of tensors, and the logit-free head."""

from posttrain_losses import preference
from posttrain_losses.head import TokenScores, WeightedSum, token_scores, weighted_logp_sum
from posttrain_losses.metrics import Max, Mean, Metric, Min, Std
from posttrain_losses.tokens import dft, masked_mean, nll, token_logps

__all__ = [
    "Max",
    "Mean",
    "Metric",
    "Min",
    "Std",
    "TokenScores",
    "WeightedSum",
    "dft",
    "masked_mean",
    "nll",
    "preference",
    "token_logps",
    "token_scores",
    "weighted_logp_sum",
]

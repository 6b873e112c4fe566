"""Loading language models, and scoring tokens under them without padding or full logits."""

from posttrain_models.layout import Layout, choose_layout
from posttrain_models.scorer import ModelSum, score_tokens, weighted_logp_sum
from posttrain_models.tiny import tiny_model
from posttrain_models.unwrap import unwrap

__all__ = [
    "Layout",
    "ModelSum",
    "choose_layout",
    "score_tokens",
    "tiny_model",
    "unwrap",
    "weighted_logp_sum",
]

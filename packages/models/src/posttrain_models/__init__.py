"""Loading language models, and scoring tokens under them without padding or full logits.

`posttrain_models.references` and `posttrain_models.rewards` hold what compares a policy with a reference, and rewards.
"""

from posttrain_models.adapters import apply_lora
from posttrain_models.completions import completion_logps, score_completions
from posttrain_models.layout import Layout, choose_layout
from posttrain_models.loading import complete_tokenizer, fit_tokens, load_model, load_tokenizer
from posttrain_models.options import LoadOptions, LoraOptions
from posttrain_models.scorer import score_tokens, weighted_logp_sum
from posttrain_models.sketch import sketch_model
from posttrain_models.tiny import tiny_model
from posttrain_models.unwrap import unwrap

__all__ = [
    "Layout",
    "LoadOptions",
    "LoraOptions",
    "apply_lora",
    "choose_layout",
    "complete_tokenizer",
    "completion_logps",
    "fit_tokens",
    "load_model",
    "load_tokenizer",
    "score_completions",
    "score_tokens",
    "sketch_model",
    "tiny_model",
    "unwrap",
    "weighted_logp_sum",
]

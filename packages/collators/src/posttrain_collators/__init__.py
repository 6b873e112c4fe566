"""Tokenised rows to tensor batches of few shapes: padding, packing, shape plans."""

from posttrain_collators.collate import TokenBatch, TokenCollator
from posttrain_collators.completions import (
    CompletionBatch,
    FeedbackCollator,
    FeedbackExtras,
    PairExtras,
    PreferenceCollator,
    pad_completions,
)
from posttrain_collators.packing import Packing, pack
from posttrain_collators.padding import Padding, pad_sequences
from posttrain_collators.shapes import plan_completion_shapes, plan_shapes

__all__ = [
    "CompletionBatch",
    "FeedbackCollator",
    "FeedbackExtras",
    "Packing",
    "Padding",
    "PairExtras",
    "PreferenceCollator",
    "TokenBatch",
    "TokenCollator",
    "pack",
    "pad_completions",
    "pad_sequences",
    "plan_completion_shapes",
    "plan_shapes",
]

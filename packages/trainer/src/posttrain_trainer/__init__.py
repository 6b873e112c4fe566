"""One training loop for every post-training method."""

from posttrain_trainer.callbacks import BEMACallback
from posttrain_trainer.checkpoint import check_files
from posttrain_trainer.config import TrainingConfig
from posttrain_trainer.describe import describe_batches, describe_memory, dtype_bytes, mark_targets
from posttrain_trainer.facade import (
    inner_tokenizer,
    load_options,
    resolve_args,
    resolve_model,
    resolve_tokenizer,
    show_messages,
)
from posttrain_trainer.method import Anchor, Method
from posttrain_trainer.plan import ShapePlan, resolve_shapes
from posttrain_trainer.sources import MapSource, StreamSource
from posttrain_trainer.trainer import Trainer

__all__ = [
    "Anchor",
    "BEMACallback",
    "MapSource",
    "Method",
    "ShapePlan",
    "StreamSource",
    "Trainer",
    "TrainingConfig",
    "check_files",
    "describe_batches",
    "describe_memory",
    "dtype_bytes",
    "inner_tokenizer",
    "load_options",
    "mark_targets",
    "resolve_args",
    "resolve_model",
    "resolve_shapes",
    "resolve_tokenizer",
    "show_messages",
]

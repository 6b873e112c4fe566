"""One training loop for every post-training method."""

from posttrain_trainer.callbacks import BEMACallback
from posttrain_trainer.config import TrainingConfig
from posttrain_trainer.method import Anchor, Method
from posttrain_trainer.plan import ShapePlan, resolve_completion_shapes, resolve_shapes
from posttrain_trainer.sources import MapSource, RunError, StreamSource
from posttrain_trainer.trainer import Trainer

__all__ = [
    "Anchor",
    "BEMACallback",
    "MapSource",
    "Method",
    "RunError",
    "ShapePlan",
    "StreamSource",
    "Trainer",
    "TrainingConfig",
    "resolve_completion_shapes",
    "resolve_shapes",
]

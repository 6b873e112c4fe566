"""Tokenised rows to tensor batches of few shapes: padding, packing, shape plans."""

from posttrain_collators.collate import TokenBatch, TokenCollator
from posttrain_collators.packing import Packing, pack
from posttrain_collators.padding import Padding, pad_sequences
from posttrain_collators.shapes import plan_shapes

__all__ = ["Packing", "Padding", "TokenBatch", "TokenCollator", "pack", "pad_sequences", "plan_shapes"]

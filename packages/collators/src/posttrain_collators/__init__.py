"""Tokenised rows to tensor batches of few shapes: padding, packing, shape plans."""

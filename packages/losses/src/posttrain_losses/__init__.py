"""Losses for post-training language models, as functions of tensors, and the logit-free head."""

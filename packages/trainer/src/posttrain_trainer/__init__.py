"""One training loop for every post-training method."""

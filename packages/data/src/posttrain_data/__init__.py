"""Chat data to token ids and loss masks, for any chat template."""

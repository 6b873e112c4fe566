"""Loading language models, and scoring tokens under them without padding or full logits."""

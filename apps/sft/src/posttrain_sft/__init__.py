"""Supervised fine-tuning of language models."""

from posttrain_cli import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "SFT": "posttrain_sft.method",
        "SFTConfig": "posttrain_sft.config",
        "SFTTrainer": "posttrain_sft.trainer",
    },
)

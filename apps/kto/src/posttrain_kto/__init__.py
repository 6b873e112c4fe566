"""Training of language models on completions that were judged good or bad."""

from posttrain_cli import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "KTO": "posttrain_kto.method",
        "KTOConfig": "posttrain_kto.config",
        "KTOTrainer": "posttrain_kto.trainer",
    },
)

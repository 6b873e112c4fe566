"""Direct preference optimisation of language models, and its variants."""

from posttrain_cli import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "DPO": "posttrain_dpo.method",
        "DPOConfig": "posttrain_dpo.config",
        "DPOTrainer": "posttrain_dpo.trainer",
    },
)

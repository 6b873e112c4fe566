"""Short runs on tiny models."""

from typing import Any

from app_runs import SETTINGS, words
from posttrain_dpo import DPOConfig, DPOTrainer
from posttrain_models import tiny_model


def pairs(count: int = 8) -> list[dict]:
    """Pairs of many lengths; the longer side is now the chosen and now the rejected one."""
    return [
        {
            "prompt": f"After {words(row, 1 + row % 4)}:",
            "chosen": " " + words(row + 1, 1 + row % 5),
            "rejected": " " + words(row + 2, 1 + (row * 3) % 7),
        }
        for row in range(count)
    ]


def config(**changes: Any) -> DPOConfig:
    """Plain gradient descent at a visible rate, every step logged, nothing saved."""
    return DPOConfig(**{**SETTINGS, "learning_rate": 0.1, **changes})


def trainer(rows: Any, tokenizer: Any, model: Any = None, *, extras: dict | None = None, **changes: Any) -> DPOTrainer:
    """A trainer on a fresh tiny llama unless a model is given; `extras` are the constructor's other arguments."""
    if model is None:
        model = tiny_model("llama", vocab_size=len(tokenizer))
    args = config(**changes)
    return DPOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, **(extras or {}))

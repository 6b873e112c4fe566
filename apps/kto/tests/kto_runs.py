"""Short runs on tiny models."""

from typing import Any

from app_runs import SETTINGS, words
from posttrain_kto import KTOConfig, KTOTrainer
from posttrain_models import tiny_model


def feedback(count: int = 8) -> list[dict]:
    """Completions of many lengths, good and bad in turn."""
    return [
        {
            "prompt": f"After {words(row, 1 + row % 4)}:",
            "completion": " " + words(row + 1, 1 + (row * 3) % 7),
            "label": row % 2 == 0,
        }
        for row in range(count)
    ]


def config(**changes: Any) -> KTOConfig:
    """Plain gradient descent at a visible rate, every step logged, nothing saved."""
    return KTOConfig(**{**SETTINGS, "learning_rate": 0.1, **changes})


def trainer(rows: Any, tokenizer: Any, model: Any = None, *, extras: dict | None = None, **changes: Any) -> KTOTrainer:
    """A trainer on a fresh tiny llama unless a model is given; `extras` are the constructor's other arguments."""
    if model is None:
        model = tiny_model("llama", vocab_size=len(tokenizer))
    args = config(**changes)
    return KTOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, **(extras or {}))

"""What `posttrain dpo` does when it is given nothing: a built-in tiny model learns built-in preferences."""

from typing import Any

from posttrain_data import tiny_tokenizer
from posttrain_models import tiny_model
from posttrain_trainer.commands import demonstration, show_improvement
from transformers import set_seed

from posttrain_dpo.config import DPOConfig
from posttrain_dpo.trainer import DPOTrainer

COUNTRIES = (
    "Austria", "Chile", "Cuba", "Egypt", "France", "Ghana", "Greece", "Ireland", "Italy", "Japan", "Kenya", "Norway",
    "Peru", "Poland", "Qatar", "Spain",
)  # fmt: skip
HELD_OUT = 4
FIGURES = {"accuracy": "eval_rewards/accuracies", "margin": "eval_rewards/margins"}

# What suits a model of this size; each takes effect where the command line left the option at its default.
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "max_steps": 20,
    "logging_steps": 5,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "report_to": "none",
}


def rows() -> list[dict]:
    """Sixteen questions, each with a polite answer that is preferred to a rude one.

    Example:
        >>> rows()[4]["chosen"][0]["content"]
        'Gladly! I would start in the north of France.'
    """
    return [
        {
            "prompt": [{"role": "user", "content": f"Where should I go in {country}?"}],
            "chosen": [{"role": "assistant", "content": f"Gladly! I would start in the north of {country}."}],
            "rejected": [{"role": "assistant", "content": f"How should I know? Go to {country} and see."}],
        }
        for country in COUNTRIES
    ]


def run(config: DPOConfig) -> int:
    """Train on most of `rows` and print the loss, and how many pairs held out are told apart before and after."""
    with demonstration(config, SETTINGS) as config:
        set_seed(config.seed)
        return show_improvement(_trainer(config), FIGURES)


def _trainer(config: DPOConfig) -> DPOTrainer:
    tokenizer = tiny_tokenizer()
    return DPOTrainer(
        model=tiny_model("llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256),
        args=config,
        train_dataset=rows()[:-HELD_OUT],
        eval_dataset=rows()[-HELD_OUT:],
        processing_class=tokenizer,
    )

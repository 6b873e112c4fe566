"""What `posttrain reward` does when it is given nothing: a built-in tiny model learns built-in preferences."""

from typing import Any

from posttrain_data import tiny_tokenizer
from posttrain_models.rewards import tiny_reward_model
from posttrain_trainer.commands import demonstration, show_improvement
from transformers import set_seed

from posttrain_reward.config import RewardConfig
from posttrain_reward.trainer import RewardTrainer

COUNTRIES = (
    "Austria", "Chile", "Cuba", "Egypt", "France", "Ghana", "Greece", "Ireland", "Italy", "Japan", "Kenya", "Norway",
    "Peru", "Poland", "Qatar", "Spain",
)  # fmt: skip
HELD_OUT = 4
FIGURES = {"accuracy": "eval_accuracy", "margin": "eval_margin"}

# What suits a model of this size; each takes effect where the command line left the option at its default.
SETTINGS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "max_steps": 40,
    "logging_steps": 10,
    "lr_scheduler_type": "constant",
    "center_rewards_coefficient": 0.01,
    "save_strategy": "no",
    "report_to": "none",
}


def rows() -> list[dict]:
    """Sixteen questions, each with a polite answer and one that is not.

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


def run(config: RewardConfig) -> int:
    """Train on most of `rows` and print the loss, and the accuracy on the others from before and after."""
    with demonstration(config, SETTINGS) as config:
        set_seed(config.seed)
        return show_improvement(_trainer(config), FIGURES)


def _trainer(config: RewardConfig) -> RewardTrainer:
    tokenizer = tiny_tokenizer()
    return RewardTrainer(
        model=tiny_reward_model("llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256),
        args=config,
        train_dataset=rows()[:-HELD_OUT],
        eval_dataset=rows()[-HELD_OUT:],
        processing_class=tokenizer,
    )

"""What `posttrain reward` does when it is given nothing: a built-in tiny model learns built-in preferences."""

from typing import Any

from posttrain_data import tiny_tokenizer
from posttrain_models.rewards import tiny_reward_model
from posttrain_trainer.facade import demonstration
from transformers import set_seed

from posttrain_reward.config import RewardConfig
from posttrain_reward.trainer import RewardTrainer

COUNTRIES = (
    "Austria", "Chile", "Cuba", "Egypt", "France", "Ghana", "Greece", "Ireland", "Italy", "Japan", "Kenya", "Norway",
    "Peru", "Poland", "Qatar", "Spain",
)  # fmt: skip
HELD_OUT = 4

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
        return _run(config)


def _run(config: RewardConfig) -> int:
    set_seed(config.seed)
    tokenizer = tiny_tokenizer()
    trainer = RewardTrainer(
        model=tiny_reward_model("llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256),
        args=config,
        train_dataset=rows()[:-HELD_OUT],
        eval_dataset=rows()[-HELD_OUT:],
        processing_class=tokenizer,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"\nloss      {' -> '.join(f'{loss:.3f}' for loss in losses)}")
        for name in ("accuracy", "margin"):
            print(
                f"{name:<9} {before[f'eval_{name}']:.2f} -> {after[f'eval_{name}']:.2f} on pairs held out", flush=True
            )
    return 0

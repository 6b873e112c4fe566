"""What `posttrain reward` and `posttrain plan reward` do once their options are read."""

from functools import partial

from posttrain_app.demo import demonstrated_pairs
from posttrain_app.plan import plan_app
from posttrain_app.run import run_app
from posttrain_models.rewards import tiny_reward_model

from posttrain_reward.trainer import RewardTrainer

DEMONSTRATION = demonstrated_pairs(
    settings={"learning_rate": 5e-5, "max_steps": 40, "logging_steps": 10, "center_rewards_coefficient": 0.01},
    figures={"accuracy": "eval_accuracy", "margin": "eval_margin"},
    architecture=tiny_reward_model,
)
run = partial(run_app, RewardTrainer, DEMONSTRATION)
plan = partial(plan_app, RewardTrainer, DEMONSTRATION)

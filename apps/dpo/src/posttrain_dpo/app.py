"""What `posttrain dpo` and `posttrain plan dpo` do once their options are read."""

from functools import partial

from posttrain_app.demo import demonstrated_pairs
from posttrain_app.plan import plan_app
from posttrain_app.run import run_app

from posttrain_dpo.trainer import DPOTrainer

DEMONSTRATION = demonstrated_pairs(
    settings={"learning_rate": 1e-4, "max_steps": 20, "logging_steps": 5},
    figures={"accuracy": "eval_rewards/accuracies", "margin": "eval_rewards/margins"},
)
run = partial(run_app, DPOTrainer, DEMONSTRATION)
plan = partial(plan_app, DPOTrainer, DEMONSTRATION)

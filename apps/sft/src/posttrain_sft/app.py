"""What `posttrain sft` and `posttrain plan sft` do once their options are read."""

from functools import partial

from posttrain_app.plan import plan_app
from posttrain_app.run import run_app

from posttrain_sft.demo import DEMONSTRATION
from posttrain_sft.trainer import SFTTrainer

run = partial(run_app, SFTTrainer, DEMONSTRATION)
plan = partial(plan_app, SFTTrainer, DEMONSTRATION)

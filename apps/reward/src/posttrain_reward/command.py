"""The `posttrain reward` command, described without importing what it runs."""

from functools import partial

from posttrain_app.command import app_command
from posttrain_launchers import run_command

COMMAND = app_command(
    "reward",
    "RewardConfig",
    "Reward modelling. Without arguments: a built-in tiny model learns to prefer polite answers.",
    replaced={
        "use_liger_kernel": "a reward model has no vocabulary head; leave the flag out",
    },
)
main = partial(run_command, COMMAND)

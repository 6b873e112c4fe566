"""The `posttrain sft` command, described without importing what it runs."""

from functools import partial

from posttrain_app.command import app_command
from posttrain_launchers import run_command

COMMAND = app_command(
    "sft",
    "SFTConfig",
    "Supervised fine-tuning. Without arguments: a built-in tiny model learns built-in rows.",
    replaced={
        "num_of_sequences": "packing fills rows of max_length",
    },
)
main = partial(run_command, COMMAND)

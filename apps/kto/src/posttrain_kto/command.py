"""The `posttrain kto` command, described without importing what it runs."""

from functools import partial

from posttrain_app.command import REPLACED_OF_PROMPTS, app_command
from posttrain_launchers import run_command

COMMAND = app_command(
    "kto",
    "KTOConfig",
    "Learning from completions labelled good or bad. Without arguments: a tiny model learns built-in rows.",
    replaced=REPLACED_OF_PROMPTS,
)
main = partial(run_command, COMMAND)

"""The `posttrain dpo` command, described without importing what it runs."""

from functools import partial

from posttrain_app.command import REPLACED_OF_PROMPTS, app_command
from posttrain_launchers import run_command

COMMAND = app_command(
    "dpo",
    "DPOConfig",
    "Direct preference optimisation. Without arguments: a built-in tiny model learns built-in preferences.",
    replaced={
        **REPLACED_OF_PROMPTS,
        "rpo_alpha": "write loss_type sigmoid sft with loss_weights 1 ALPHA",
        "reference_free": "write loss_type simpo, which has no reference",
    },
)
main = partial(run_command, COMMAND)

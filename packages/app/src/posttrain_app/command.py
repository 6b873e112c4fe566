"""How the command of an app is described, without importing what it runs."""

import sys
from collections.abc import Mapping
from pathlib import Path

from posttrain_cli import Command

# Options of other libraries that have no meaning here, and what to write instead.
REPLACED = {
    "max_seq_length": "the option is max_length",
    "use_liger_kernel": "the head never keeps full logits here; leave the flag out",
}
REPLACED_OF_PROMPTS = {
    "max_prompt_length": "prompts are not cut: max_length limits a prompt with its completion",
    "max_completion_length": "the option is max_length, for a prompt with its completion",
}


def app_command(name: str, config: str, summary: str, replaced: Mapping[str, str]) -> Command:
    """The command of the app `posttrain_<name>`, which this module's caller belongs to.

    By convention its options are in `config.py`, what it does are `run` and `plan` of `app.py`, and the table of its
    options is `options.json` beside them.

    Args:
        name: The word after `posttrain`.
        config: The dataclass of its options in `config.py`.
        summary: One sentence for the help.
        replaced: A name that other libraries use -> what to write instead, besides what holds for every app.

    Example:
        >>> import posttrain_app
        >>> from posttrain_app import app_command
        >>> command = app_command("app", "MethodConfig", "Show it.", {"epochs": "the option is num_train_epochs"})
        >>> command.run, command.configs["app"]
        ('posttrain_app.app:run', 'posttrain_app.config:MethodConfig')
    """
    package = f"posttrain_{name}"
    return Command(
        name=name,
        summary=summary,
        configs={
            name: f"{package}.config:{config}",
            "model": "posttrain_models:LoadOptions",
            "lora": "posttrain_models:LoraOptions",
            "data": "posttrain_data:DatasetOptions",
        },
        run=f"{package}.app:run",
        plan=f"{package}.app:plan",
        launcher="posttrain_launchers:LaunchOptions",
        table=Path(str(sys.modules[package].__file__)).with_name("options.json"),
        replaced={**REPLACED, **replaced},
    )

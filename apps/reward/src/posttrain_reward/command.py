"""The `posttrain reward` command, described without importing what it runs."""

from collections.abc import Sequence
from pathlib import Path

from posttrain_cli import Command
from posttrain_launchers import run_command

COMMAND = Command(
    name="reward",
    summary="Reward modelling. Without arguments: a built-in tiny model learns which of two answers is right.",
    configs={
        "reward": "posttrain_reward.config:RewardConfig",
        "model": "posttrain_models:LoadOptions",
        "lora": "posttrain_models:LoraOptions",
        "data": "posttrain_data:DatasetOptions",
    },
    run="posttrain_reward.train:main",
    plan="posttrain_reward.plan:main",
    launcher="posttrain_launchers:LaunchOptions",
    table=Path(__file__).with_name("options.json"),
    replaced={
        "max_seq_length": "the option is max_length",
        "use_liger_kernel": "a reward model has no vocabulary head; leave the flag out",
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Example:
        >>> from posttrain_reward.command import main
        >>> main(["--max_lenght", "512"])
        2
    """
    return run_command(COMMAND, argv)

"""The `posttrain sft` command, described without importing what it runs."""

from collections.abc import Sequence
from pathlib import Path

from posttrain_cli import Command
from posttrain_launchers import run_command

COMMAND = Command(
    name="sft",
    summary="Supervised fine-tuning. Without arguments: a built-in tiny model learns built-in rows.",
    configs={
        "sft": "posttrain_sft.config:SFTConfig",
        "model": "posttrain_models:LoadOptions",
        "lora": "posttrain_models:LoraOptions",
        "data": "posttrain_data:DatasetOptions",
    },
    run="posttrain_sft.train:main",
    plan="posttrain_sft.plan:main",
    launcher="posttrain_launchers:LaunchOptions",
    table=Path(__file__).with_name("options.json"),
    replaced={
        "max_seq_length": "the option is max_length",
        "num_of_sequences": "packing fills rows of max_length",
        "use_liger_kernel": "the head never keeps full logits here; leave the flag out",
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Example:
        >>> from posttrain_sft.command import main
        >>> main(["--max_lenght", "512"])
        2
    """
    return run_command(COMMAND, argv)

"""The `posttrain dpo` command, described without importing what it runs."""

from collections.abc import Sequence
from pathlib import Path

from posttrain_cli import Command
from posttrain_launchers import run_command

COMMAND = Command(
    name="dpo",
    summary="Direct preference optimisation. Without arguments: a built-in tiny model learns built-in preferences.",
    configs={
        "dpo": "posttrain_dpo.config:DPOConfig",
        "model": "posttrain_models:LoadOptions",
        "lora": "posttrain_models:LoraOptions",
        "data": "posttrain_data:DatasetOptions",
    },
    run="posttrain_dpo.train:main",
    plan="posttrain_dpo.plan:main",
    launcher="posttrain_launchers:LaunchOptions",
    table=Path(__file__).with_name("options.json"),
    replaced={
        "max_prompt_length": "prompts are not cut: max_length limits a prompt with its completion",
        "max_completion_length": "the option is max_length, for a prompt with its completion",
        "rpo_alpha": "write loss_type sigmoid sft with loss_weights 1 ALPHA",
        "reference_free": "write loss_type simpo, which has no reference",
        "use_liger_kernel": "the head never keeps full logits here; leave the flag out",
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Example:
        >>> from posttrain_dpo.command import main
        >>> main(["--max_lenght", "512"])
        2
    """
    return run_command(COMMAND, argv)

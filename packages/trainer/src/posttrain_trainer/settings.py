"""Options of training whose values cannot be meant, or cannot be honoured here: refused when a config is made."""

import importlib.util
import inspect
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import hub

SEEDS = 2**32  # numpy's generators, which `set_seed` seeds too, take no larger one
STRATEGIES = ("random", "sequential", "group_by_length")

# What a tracker needs where that is not the package of its own name.
NEEDS = {"azure_ml": "azureml-sdk", "flyte": "flytekit"}
UNLISTED = {"azure_ml": "azureml", "flyte": "flytekit"}  # transformers leaves them out of what it finds


def check_numbers(args: Any) -> None:
    """Checks sizes, steps, seeds and rates.

    Raises:
        ValueError: Naming the option and what to write.
    """
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)}: write a number of at least 1")
    if args.max_steps == 0 or args.max_steps < -1:
        raise ValueError(f"max_steps={args.max_steps}: write a number of at least 1, or -1 to count in epochs")
    if args.max_steps == -1 and not args.num_train_epochs > 0:
        raise ValueError(f"num_train_epochs={args.num_train_epochs}: write a number above 0")
    if not args.learning_rate >= 0:
        raise ValueError(f"learning_rate={args.learning_rate}: write a number that is not negative")
    for name in ("seed", "data_seed"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < SEEDS:
            raise ValueError(f"{name}={value}: write a whole number from 0 to {SEEDS - 1}")
    for what in ("logging", "save", "eval"):
        _check_interval(what, getattr(args, f"{what}_strategy"), getattr(args, f"{what}_steps"))
    if args.max_shapes is not None and args.max_shapes < 1:
        raise ValueError(f"max_shapes={args.max_shapes}: write a number of at least 1, or leave it out")
    if args.shuffle_buffer < 0:
        raise ValueError(f"shuffle_buffer={args.shuffle_buffer}: write a number of rows, or 0 for no shuffling")


def _check_interval(what: str, strategy: Any, steps: float | None) -> None:
    asked = strategy == "steps" or what == "eval"  # eval_steps is None unless someone writes it
    if steps is not None and asked and not steps > 0:
        raise ValueError(
            f"{what}_steps={steps}: write a number above 0 (below 1 it is a share of all steps), or "
            f"{what}_strategy='no' for never"
        )


def check_choices(args: Any) -> None:
    """Checks what may change the rows of a step, and the output folder.

    Raises:
        ValueError: Naming the option and what to write.
    """
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would change the rows of a step in mid-run: set "
            "per_device_train_batch_size, and gradient_accumulation_steps to keep their product"
        )
    if args.train_sampling_strategy not in STRATEGIES:
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} moves rows between optimiser steps: "
            f"write one of {', '.join(STRATEGIES)} ('group_by_length' orders rows within each step)"
        )
    if args.output_dir is not None and not str(args.output_dir):
        raise ValueError("output_dir is empty: name the folder to write to")


def check_surroundings(args: Any) -> None:
    """Checks what an option needs besides this package: DeepSpeed, trackers, access to the hub.

    Raises:
        ValueError: Naming the option, what is missing and what to do.
    """
    if args.deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise ValueError("deepspeed needs the package deepspeed: pip install deepspeed, or leave the option out")
    _check_trackers(args.report_to)
    if not args.push_to_hub:
        return
    if hub.is_offline_mode():
        raise ValueError("push_to_hub=True, but HF_HUB_OFFLINE is set: unset it, or write push_to_hub=False")
    if "authorization" not in hub.build_hf_headers(token=args.hub_token):
        raise ValueError(
            "push_to_hub=True, but there is no token of the hub: log in with `hf auth login`, set HF_TOKEN, or write "
            "push_to_hub=False"
        )


def _check_trackers(report_to: Any) -> None:
    named = [report_to] if isinstance(report_to, str) else list(report_to or [])
    named = [name for name in named if name not in ("none", "all")]
    for name in named:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"report_to={name!r}: write none, all, or some of {', '.join(INTEGRATION_TO_CALLBACK)}")
    there = set(get_available_reporting_integrations()) if named else set()
    there |= {name for name, module in UNLISTED.items() if importlib.util.find_spec(module) is not None}
    for name in named:
        if name == "kubeflow" and name not in there:
            raise ValueError("report_to='kubeflow' works inside a Kubeflow TrainJob alone: write report_to='none'")
        if name not in there:
            package = NEEDS.get(name, name)
            raise ValueError(
                f"report_to={name!r} needs the package {package}, which is not installed here: pip install {package}, "
                "or write report_to='none'"
            )


def check_checkpointing(options: dict[str, Any]) -> None:
    """Checks the keys of `gradient_checkpointing_kwargs`, which PyTorch would take for arguments of the layers.

    Raises:
        ValueError: Naming the unknown key and the known ones.
    """
    known = sorted({"selective", *_keywords(checkpoint), *_enabling()})
    for key in options:
        if key not in known:
            raise ValueError(
                f"gradient_checkpointing_kwargs has the unknown key {key!r}: write some of {', '.join(known)}"
            )
    every = options.get("every_n_layers", 1)
    if not isinstance(every, int) or every < 1:
        raise ValueError(
            f"gradient_checkpointing_kwargs has every_n_layers={every!r}: write a whole number of at least 1"
        )


def _keywords(function: Any) -> set[str]:
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY}


def _enabling() -> list[str]:
    """What the models of this transformers take besides, when checkpointing is switched on: some versions nothing."""
    new = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    parameters = inspect.signature(new or PreTrainedModel.gradient_checkpointing_enable).parameters
    return [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD][2:]

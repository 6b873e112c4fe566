"""What a trainer was given: the config that is meant, and what can be refused of it before anything is read."""

import logging
import os
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

from posttrain_models import LoadOptions
from torch import nn
from transformers import TrainingArguments

logger = logging.getLogger("posttrain")


def resolve_args(args: TrainingArguments | None, config_class: type, model: Any) -> Any:
    """The method's own config, whatever was passed.

    Args:
        args: An instance of `config_class`, plain `TrainingArguments`, or None for the defaults.
        config_class: The config of the method, a subclass of `TrainingConfig`.
        model: What the trainer was given as its model; names the default output folder, with the method.

    Raises:
        ValueError: `args` is something else.

    Example:
        >>> from posttrain_app import MethodConfig
        >>> from posttrain_app.arguments import resolve_args
        >>> resolve_args(None, MethodConfig, "Qwen/Qwen3-0.6B").output_dir
        'Qwen3-0.6B-Method'
    """
    show_messages()
    if isinstance(args, config_class):
        return args
    if args is None:
        return config_class(output_dir=f"{_model_name(model)}-{config_class.__name__.removesuffix('Config')}")
    if not isinstance(args, TrainingArguments):
        raise ValueError(f"args must be a {config_class.__name__}; got {type(args).__name__}.")
    known = {item.name for item in fields(config_class) if item.init}
    given = {item.name: getattr(args, item.name) for item in fields(args) if item.init and item.name in known}
    return config_class(**given)


def check_run(args: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse, before anything is read or loaded, a run that cannot begin or end.

    Args:
        args: The method's config.
        train_dataset: Rows, or None.
        eval_dataset: Rows, several sets of them by name, or None.

    Raises:
        ValueError: Naming the option or argument and what to write instead.

    Example:
        >>> from posttrain_app import MethodConfig
        >>> from posttrain_app.arguments import check_run
        >>> check_run(MethodConfig(str(getfixture("tmp_path")), use_cpu=True), [{"text": "a b"}], None)
    """
    folder = Path(args.output_dir).absolute()
    there = next(part for part in (folder, *folder.parents) if part.exists())
    if not there.is_dir():
        raise ValueError(f"output_dir={args.output_dir!r}: {there} is a file, not a folder: name another one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir={args.output_dir!r}: {there} cannot be written to: name another folder.")
    if train_dataset is None:
        raise ValueError("train_dataset is missing: pass a data set or a list of rows.")
    if evaluates(args) and eval_dataset is None:
        raise ValueError(f"eval_strategy={_strategy(args)!r} needs rows: pass eval_dataset (or set test_split_size).")
    if not hasattr(train_dataset, "__len__") and args.max_steps <= 0:
        raise ValueError(f"max_steps={args.max_steps}: a stream has no length, so write how many steps to train.")


def evaluates(args: Any) -> bool:
    """Whether a run evaluates while it trains."""
    return _strategy(args) != "no"


def _strategy(args: Any) -> str:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy))


def show_messages() -> None:
    """Let the packages' one-line messages appear on stderr, on the first rank, unless logging is set up already.

    Example:
        >>> from posttrain_app.arguments import show_messages
        >>> show_messages()
    """
    if logging.root.handlers or int(os.environ.get("RANK", "0")):
        return
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _model_name(model: Any) -> str:
    """The last part of a model's name: of a path, of `LoadOptions`, or of the folder a model was loaded from."""
    if isinstance(model, LoadOptions):
        model = model.model_name_or_path
    if isinstance(model, nn.Module):
        model = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    return (PurePath(model).name if isinstance(model, str | os.PathLike) else "") or "model"

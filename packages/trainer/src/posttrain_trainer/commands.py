"""What the commands of the apps share: training from options, and demonstrations."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from posttrain_models import LoadOptions, LoraOptions

from posttrain_trainer.checkpoint import check_files
from posttrain_trainer.facade import evaluates, show_messages
from posttrain_trainer.sources import RunError


def run_app(
    trainer_class: Callable[..., Any],
    config: Any,
    model: LoadOptions,
    lora: LoraOptions,
    data: Any,
    *,
    demonstrate: Callable[[Any], int],
    load: Callable[..., tuple[Any, Any]],
    data_error: type[Exception],
    mistakes: Callable[..., AbstractContextManager],
) -> int:
    """What the command of an app does once its options are read.

    Without model and data it is the demonstration. Otherwise it trains, saves, and says where.

    Args:
        trainer_class: The app's trainer.
        config: Options of the method and of training.
        model: The model and how to load it.
        lora: The adapter, if one is trained.
        data: Options of the rows.
        demonstrate: The app's demonstration, of a config.
        load: `posttrain_data.load_datasets`.
        data_error: `posttrain_data.DataError`.
        mistakes: `posttrain_cli.mistakes`.

    Returns:
        The exit code.
    """
    show_messages()

    def make() -> Any:
        if model.model_name_or_path is None:
            raise ValueError("model_name_or_path is missing: name the model to train, a folder or a name on the hub.")
        rows, held_out = load(data, evaluate=evaluates(config), seed=config.seed)
        return trainer_class(model=model, args=config, train_dataset=rows, eval_dataset=held_out, peft_config=lora)

    if model.model_name_or_path is None and not data.given:
        code = demonstrate(config)
    else:
        code = run_training(config, make, mistakes, data_error)
    # A process that ends with a group still open can be aborted by the group's threads, after all its work is done.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


def run_training(
    config: Any, make: Callable[[], Any], mistakes: Callable[..., AbstractContextManager], *kinds: type[Exception]
) -> int:
    """Make the trainer, train, save, and say where.

    Args:
        config: The method's config.
        make: Makes the trainer. Every `ValueError` it raises is a mistake of the user.
        mistakes: `posttrain_cli.mistakes`.
        kinds: What else is one once training has begun, besides `RunError` and a package that is missing.

    Returns:
        The exit code.
    """
    with mistakes(ValueError, ImportError):
        resume = _resume_point(config.resume_from_checkpoint)
        if isinstance(resume, str):
            check_files(Path(resume))
        trainer = make()
        resume = trainer.checkpoint_to_resume(resume)
    with mistakes(RunError, ImportError, *kinds):
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        trainer.save_state()
    if config.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        print(f"saved to {Path(config.output_dir).resolve()}", flush=True)
    return 0


def _resume_point(value: Any) -> str | bool | None:
    """The checkpoint that a command line names: a folder, or yes for the newest in the output folder."""
    text = str(value).lower()
    if value is None or text in ("none", "false", "no"):
        return None
    return True if text in ("true", "yes") else str(value)


@contextmanager
def demonstration(config: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """The config of a demonstration: `settings` where the command line left an option at its default.

    Args:
        config: What the command line said.
        settings: What suits the demonstration's model and rows.

    Yields:
        A config that writes to a folder which is removed afterwards, unless `output_dir` was given.

    Example:
        >>> from posttrain_trainer import TrainingConfig
        >>> from posttrain_trainer.commands import demonstration
        >>> with demonstration(TrainingConfig(max_steps=3), {"max_steps": 40, "learning_rate": 1e-3}) as config:
        ...     config.max_steps, config.learning_rate
        (3, 0.001)
    """
    defaults = type(config)()
    names = [item.name for item in fields(config) if item.init]
    given = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(defaults, name)}
    with tempfile.TemporaryDirectory(prefix="posttrain-") as scratch:
        yield type(config)(**{**settings, "output_dir": scratch, **given})


def show_improvement(trainer: Any, figures: dict[str, str]) -> int:
    """Train, and print the losses on the way and what an evaluation says before and after.

    Args:
        trainer: The trainer of a demonstration.
        figures: Metrics of the evaluation by the name to print.

    Returns:
        The exit code of the demonstration.
    """
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"\nloss      {' -> '.join(f'{loss:.3f}' for loss in losses)}")
        for name, key in figures.items():
            print(f"{name:<9} {before[key]:.2f} -> {after[key]:.2f} on pairs held out", flush=True)
    return 0

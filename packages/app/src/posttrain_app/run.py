"""What the command of an app does once its options are read: train, save, and say where."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from posttrain_cli import mistakes
from posttrain_data import DataError, DatasetOptions, load_datasets
from posttrain_models import LoadOptions, LoraOptions
from posttrain_trainer import RunError
from posttrain_trainer.checkpoint import check_files

from posttrain_app.arguments import evaluates, show_messages
from posttrain_app.config import MethodConfig
from posttrain_app.demo import Demonstration
from posttrain_app.trainer import AppTrainer


def run_app(
    trainer_class: type[AppTrainer],
    demonstration: Demonstration,
    config: Any,
    model: LoadOptions,
    lora: LoraOptions,
    data: DatasetOptions,
) -> int:
    """What the command of an app does once its options are read.

    Without model and data it is the demonstration. Otherwise it trains, saves, and says where.

    Args:
        trainer_class: The app's trainer.
        demonstration: The app's demonstration.
        config: Options of the method and of training.
        model: The model and how to load it.
        lora: The adapter, if one is trained.
        data: The rows.

    Returns:
        The exit code.

    Raises:
        CommandError: For a mistake in the options or the rows.

    Example:
        In the module that an app's command names, for a trainer and a demonstration of its own:

        >>> from functools import partial
        >>> from posttrain_app import AppTrainer, Demonstration, run_app
        >>> run = partial(run_app, AppTrainer, Demonstration(rows=[], settings={}))
    """
    show_messages()

    def make() -> AppTrainer:
        if model.model_name_or_path is None:
            raise ValueError("model_name_or_path is missing: name the model to train, a folder or a name on the hub.")
        rows, held_out = load_datasets(data, evaluate=evaluates(config), seed=config.seed)
        return trainer_class(model=model, args=config, train_dataset=rows, eval_dataset=held_out, peft_config=lora)

    if model.model_name_or_path is None and not data.given:
        code = demonstration.run(trainer_class, config)
    else:
        code = train_and_save(config, make)
    # A process that ends with a group still open can be aborted by the group's threads, after all its work is done.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


def train_and_save(config: MethodConfig, make: Callable[[], Any]) -> int:
    """Make the trainer, train, save, and say where.

    Args:
        config: The method's config.
        make: Makes the trainer. Every `ValueError` it raises is a mistake of the user; of those of training, only those
            about the run and its rows are.

    Returns:
        The exit code.
    """
    with mistakes(ValueError, ImportError):
        resume = _resume_point(config.resume_from_checkpoint)
        if isinstance(resume, str):
            check_files(Path(resume))
        trainer = make()
        resume = trainer.checkpoint_to_resume(resume)
    with mistakes(RunError, ImportError, DataError):
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

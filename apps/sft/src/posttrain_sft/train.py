"""What `posttrain sft` does once its options are read."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain_cli import CommandError
from posttrain_data import DataError, DatasetOptions, load_datasets
from posttrain_models import LoadOptions, LoraOptions
from posttrain_trainer import RunError
from posttrain_trainer.checkpoint import check_files
from posttrain_trainer.facade import show_messages

from posttrain_sft.config import SFTConfig
from posttrain_sft.trainer import SFTTrainer


def main(config: SFTConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions) -> int:
    """Train, save, and say where; without model and data, the demonstration of `posttrain_sft.demo`.

    Args:
        config: Options of the method and of training.
        model: The model and how to load it.
        lora: The adapter, if one is trained.
        data: The rows.

    Returns:
        The exit code.
    """
    show_messages()
    if model.model_name_or_path is None and not data.given:
        from posttrain_sft.demo import run

        return run(config)
    with mistakes(ValueError, ImportError):
        resume = resume_point(config.resume_from_checkpoint)
        if isinstance(resume, str):
            check_files(Path(resume))
        trainer = make_trainer(config, model, lora, data)
        resume = trainer.checkpoint_to_resume(resume)
    with mistakes(DataError, RunError, ImportError):
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        trainer.save_state()
    if config.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        print(f"saved to {Path(config.output_dir).resolve()}", flush=True)
    return 0


def make_trainer(config: SFTConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions) -> SFTTrainer:
    """The trainer that the options describe."""
    if model.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing: name the model to train, a folder or a name on the hub.")
    evaluate = str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no"
    rows, held_out = load_datasets(data, evaluate=evaluate, seed=config.seed)
    return SFTTrainer(model=model, args=config, train_dataset=rows, eval_dataset=held_out, peft_config=lora)


@contextmanager
def mistakes(*kinds: type[Exception]) -> Iterator[None]:
    """What is wrong with the input, a missing package, or a disk that is full, becomes one line and exit code 2."""
    try:
        yield
    except kinds as error:
        raise CommandError(" ".join(str(error).split())) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CommandError(error.strerror) from error


def resume_point(value: Any) -> str | bool | None:
    """The checkpoint that a command line names: a folder, or yes for the newest in the output folder."""
    text = str(value).lower()
    if value is None or text in ("none", "false", "no"):
        return None
    return True if text in ("true", "yes") else str(value)

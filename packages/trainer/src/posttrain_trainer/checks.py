"""What a trainer refuses, said before it is made."""

import logging
from typing import Any

from transformers import TrainerCallback

from posttrain_trainer.config import checkpointing, checkpointing_kwargs
from posttrain_trainer.method import Method
from posttrain_trainer.settings import check_checkpointing
from posttrain_trainer.sources import is_batch_source

logger = logging.getLogger("posttrain")


def check_arguments(method: Any, args: Any, collator: Any, data: tuple[Any, Any], compute_metrics: Any) -> None:
    """Checks what a trainer is made of, before it is made.

    Args:
        method: The method.
        args: The training arguments.
        collator: The collator, or None.
        data: Training and evaluation data.
        compute_metrics: The function of predictions, or None.

    Raises:
        ValueError: Naming the argument that cannot be honoured and what to write instead.
    """
    if not isinstance(method, Method):
        raise ValueError(f"method={method!r}: a method has count(batch) and loss(model, batch)")
    for rows in data:
        parts = rows.values() if isinstance(rows, dict) else [rows]
        if collator is None and any(part is not None and not is_batch_source(part) for part in parts):
            raise ValueError(
                "data_collator is None: pass a function that makes a batch (a NamedTuple) of a list of rows"
            )
    if compute_metrics is not None and not hasattr(method, "predict"):
        raise ValueError(
            f"compute_metrics needs predictions, and {type(method).__name__} has no predict(model, batch): "
            "write one, or return metrics from its loss"
        )
    if "loss" in args.include_for_metrics:
        raise ValueError(
            "include_for_metrics=['loss']: there is no loss for each row; return a metric from method.loss"
        )
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor}: the loss is the method's own; set it to 0"
        )
    check_checkpointing(checkpointing_kwargs(args))
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True would change the rows of a step in mid-run: set it to False")
    if args.dataloader_num_workers:
        logger.warning("dataloader_num_workers has no effect: batches are made when an optimiser step asks for them")
    if checkpointing_kwargs(args).get("selective") and not checkpointing(args):
        raise ValueError(
            "gradient_checkpointing_kwargs has 'selective' but gradient_checkpointing is False: set it to True"
        )


def check_objects(processing_class: Any, callbacks: Any, compute_metrics: Any = None) -> None:
    """Checks the objects that a trainer is given besides its model, data and arguments.

    Args:
        processing_class: A tokenizer or processor, or None.
        callbacks: A list of callbacks or of their classes, or None.
        compute_metrics: A function of predictions, or None.

    Raises:
        ValueError: Naming the argument and what to pass.

    Example:
        >>> check_objects(None, [TrainerCallback()])
        >>> check_objects("gpt2", None)
        Traceback (most recent call last):
        ValueError: processing_class='gpt2': pass a tokenizer or processor that is loaded, or leave it out
    """
    if processing_class is not None and not hasattr(processing_class, "save_pretrained"):
        raise ValueError(
            f"processing_class={processing_class!r:.60}: pass a tokenizer or processor that is loaded, or leave it out"
        )
    if compute_metrics is not None and not callable(compute_metrics):
        raise ValueError(f"compute_metrics={compute_metrics!r:.60}: pass a function of an EvalPrediction")
    if callbacks is not None and not isinstance(callbacks, list):
        raise ValueError(f"callbacks={callbacks!r:.60}: pass a list of callbacks")
    for index, one in enumerate(callbacks or []):
        if not isinstance(one, TrainerCallback) and not (isinstance(one, type) and issubclass(one, TrainerCallback)):
            raise ValueError(f"callbacks[{index}]={one!r:.60}: pass an object of a class made from TrainerCallback")

"""What a trainer refuses, said before it is made."""

import logging
from typing import Any

from posttrain_trainer.config import checkpointing, checkpointing_kwargs
from posttrain_trainer.method import Method
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
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True would change the rows of a step in mid-run: set it to False")
    if args.dataloader_num_workers:
        logger.warning("dataloader_num_workers has no effect: batches are made when an optimiser step asks for them")
    if checkpointing_kwargs(args).get("selective") and not checkpointing(args):
        raise ValueError(
            "gradient_checkpointing_kwargs has 'selective' but gradient_checkpointing is False: set it to True"
        )

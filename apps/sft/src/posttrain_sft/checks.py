"""What can be refused before weights are loaded."""

import os
from pathlib import Path
from typing import Any

from posttrain_models import LoadOptions, sketch_model
from torch import nn

from posttrain_sft.config import SFTConfig


def check_run(args: SFTConfig, train_dataset: Any, eval_dataset: Any, compute_metrics: Any) -> None:
    """Refuse options that contradict each other or the data sets that came with them.

    Raises:
        ValueError: Naming the option and what to write instead.
    """
    _check_folder(args.output_dir)
    if train_dataset is None:
        raise ValueError("train_dataset is missing: pass a data set or a list of rows.")
    evaluate = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if evaluate != "no" and eval_dataset is None:
        raise ValueError(f"eval_strategy={evaluate!r} needs rows: pass eval_dataset (or set test_split_size).")
    if not hasattr(train_dataset, "__len__") and args.max_steps <= 0:
        raise ValueError(f"max_steps={args.max_steps}: a stream has no length, so write how many steps to train.")
    if compute_metrics is not None and eval_packing(args):
        raise ValueError("compute_metrics needs rows as they are: set eval_packing=False.")


def _check_folder(output_dir: Any) -> None:
    """Whether the output folder can be made and written to; it is made when there is something to write."""
    folder = Path(output_dir).absolute()
    there = next(part for part in (folder, *folder.parents) if part.exists())
    if not there.is_dir():
        raise ValueError(f"output_dir={str(output_dir)!r}: {there} is a file, not a folder: name another one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir={str(output_dir)!r}: {there} cannot be written to: name another folder.")


def check_tokenised(dataset: Any, name: str) -> Any:
    """Rows that are taken as they are, if they can be.

    Raises:
        ValueError: Naming the data set and the column.
    """
    if hasattr(dataset, "__len__") and not len(dataset):
        raise ValueError(f"{name}: the data set is empty: give at least one row.")
    first = next(iter(dataset), None)
    if first is None or first.get("input_ids") is None:
        columns = ", ".join(map(repr, first or ()))
        raise ValueError(f"{name}: row 0 has no 'input_ids' (columns: {columns}), which skip_prepare_dataset needs.")
    for column in ("completion_mask", "assistant_masks"):
        if first.get(column) is not None and first.get("loss_mask") is None and first.get("labels") is None:
            raise ValueError(
                f"{name}: column {column!r} is read by the preparation, which skip_prepare_dataset leaves out: "
                "write 'labels' or 'loss_mask'."
            )
    return dataset


def eval_packing(args: SFTConfig) -> bool:
    """Whether evaluation rows are packed."""
    return args.packing if args.eval_packing is None else args.eval_packing


def sketch(model: LoadOptions, args: SFTConfig) -> nn.Module | None:
    """A cut of the model without its weights, where options are asked for that not every model can do.

    None where there is nothing to find out, and where the attention was chosen by name: kernels of an accelerator
    cannot be tried on a cut on the CPU.
    """
    chosen = model.attn_implementation or (args.model_init_kwargs or {}).get("attn_implementation")
    demanding = args.packing or args.padding_free or args.max_shapes or args.router_aux_loss_coef
    return sketch_model(model)[1] if demanding and not chosen else None

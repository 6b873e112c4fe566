"""What can be refused before weights are loaded."""

from typing import Any

from posttrain_sft.config import SFTConfig


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

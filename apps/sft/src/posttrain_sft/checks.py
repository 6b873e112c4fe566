"""What can be refused before weights are loaded."""

from typing import Any

from posttrain_models import LoadOptions, sketch_model
from torch import nn

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


def sketch(model: LoadOptions, args: SFTConfig) -> nn.Module | None:
    """A cut of the model without its weights, where options are asked for that not every model can do.

    None where there is nothing to find out, and where the attention was chosen by name: kernels of an accelerator
    cannot be tried on a cut on the CPU.
    """
    chosen = model.attn_implementation or (args.model_init_kwargs or {}).get("attn_implementation")
    demanding = args.packing or args.padding_free or args.max_shapes or args.router_aux_loss_coef
    return sketch_model(model)[1] if demanding and not chosen else None

"""The arguments that every method shares."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from posttrain_devices import DeviceSpec, device_spec, resolve_pad_multiple, supports_bf16
from transformers import TrainingArguments

from posttrain_trainer.fields import check_types
from posttrain_trainer.settings import check_checkpointing, check_choices, check_numbers, check_surroundings

RENAMED = "activation_checkpointing" in {item.name for item in fields(TrainingArguments)}


@dataclass
class TrainingConfig(TrainingArguments):
    """`transformers.TrainingArguments` with the defaults of post-training, and the shape options.

    Differences from `TrainingArguments`:

    * `logging_steps` is 10 and `gradient_checkpointing` True. (transformers 5.24 calls it `activation_checkpointing`;
      both names work with every version, and so do the `_kwargs`.)
    * `gradient_checkpointing_kwargs={"selective": True}` keeps attention outputs and recomputes the rest.
    * `bf16=None` means True on accelerators that compute in bfloat16 themselves, unless `fp16` is set. On the CPU it
      means False: few CPUs gain from it, and float32 there is what other devices are compared with.
    * `train_sampling_strategy="group_by_length"` orders rows by length within each optimiser step, never across.
    * `logging_nan_inf_filter` is False: a loss that is nan is logged as nan.
    * `remove_unused_columns` is False: a batch is what the collator makes of whole rows.

    Args:
        logging_steps: Steps between two logs.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
        bf16: Mixed precision in bfloat16; None decides by the device.
        pad_to_multiple_of: Widths of batches are multiples of this. "auto" is what the device asks for (128 on
            Trainium, otherwise none); None or "none" switches shape planning off.
        max_shapes: How many different widths batches may have; None is what the device asks for (2 on Trainium,
            otherwise no limit).
        activation_offloading: Keep the tensors saved for backward in host memory instead of on the accelerator.
        shuffle_buffer: Rows of a streaming dataset that are shuffled together; 0 keeps the order of the stream.

    Raises:
        ValueError: For values of the wrong type or out of range, `bf16` on a device without it,
            `auto_find_batch_size`, unknown keys of `gradient_checkpointing_kwargs`, and options that need a package, a
            file or a token that is not there.

    Example:
        >>> from posttrain_trainer import TrainingConfig
        >>> args = TrainingConfig("out", use_cpu=True, gradient_checkpointing=False, pad_to_multiple_of="64")
        >>> args.logging_steps, args.bf16, args.gradient_checkpointing, args.pad_to_multiple_of
        (10, False, False, 64)
    """

    logging_steps: float = field(default=10, metadata={"help": "Steps between two logs."})
    gradient_checkpointing: bool = field(  # ty: ignore[incompatible-mutable-override]
        default=True, metadata={"help": "Recompute activations in the backward pass instead of keeping them."}
    )
    bf16: bool | None = field(  # ty: ignore[incompatible-attribute-override]
        default=None,
        metadata={"help": "Mixed precision in bfloat16. Default: on accelerators that have it, unless fp16 is set."},
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Has no effect: nan is logged as nan."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Has no effect: rows keep their columns."})
    pad_to_multiple_of: int | str | None = field(
        default="auto",
        metadata={"help": "Widths of batches are multiples of this: a number, 'auto' (by device) or 'none'."},
    )
    max_shapes: int | None = field(
        default=None, metadata={"help": "How many different widths batches may have. Default: by device."}
    )
    activation_offloading: bool = field(
        default=False, metadata={"help": "Keep what is saved for backward in host memory."}
    )
    shuffle_buffer: int = field(
        default=0, metadata={"help": "Rows of a streaming dataset that are shuffled together; 0 keeps its order."}
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_numbers(self)
        check_surroundings(self)
        spec = self._spec()
        if self.pad_to_multiple_of != "auto":
            self.pad_to_multiple_of = resolve_pad_multiple(self.pad_to_multiple_of, spec)
        self._resolve_precision(spec)
        # Without an accelerator several processes find each other only if the CPU was asked for by name.
        self.use_cpu = self.use_cpu or spec.name == "cpu"
        if RENAMED and self.activation_checkpointing is None:
            # Set here, so that transformers neither warns about the name that users type nor overrides it.
            self.activation_checkpointing = self.gradient_checkpointing
        if RENAMED and self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        super().__post_init__()
        check_checkpointing(self.checkpointing_kwargs)

    def _spec(self) -> DeviceSpec:
        on_cpu = self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on")
        return device_spec("cpu" if on_cpu else None)

    def _resolve_precision(self, spec: DeviceSpec) -> None:
        if self.fp16 and (spec.name == "cpu" or "float16" not in spec.autocast_dtypes):
            raise ValueError(
                f"fp16=True, but mixed precision in float16 is not to be had on {spec.name}: write fp16=False "
                "(bf16=True where the device has it)"
            )
        if self.bf16 is None:
            self.bf16 = not self.fp16 and spec.name != "cpu" and supports_bf16(spec)
        elif self.bf16 and not self.use_cpu:
            if not supports_bf16(spec):
                raise ValueError(
                    f"bf16=True, but the {spec.name} here does not compute in bfloat16: write bf16=False "
                    "(or use_cpu=True to train on the CPU, which emulates it slowly)"
                )

    @property
    def checkpointing_kwargs(self) -> dict[str, Any]:
        """The options of gradient checkpointing, under whichever name they were given."""
        return checkpointing_kwargs(self)


def checkpointing(args: TrainingArguments) -> bool:
    """Whether activations are recomputed, under whichever name this transformers has for it."""
    return bool(args.activation_checkpointing if RENAMED else args.gradient_checkpointing)


def checkpointing_kwargs(args: TrainingArguments) -> dict[str, Any]:
    """The options of gradient checkpointing, under whichever name this transformers has for them."""
    value: Any = args.activation_checkpointing_kwargs if RENAMED else args.gradient_checkpointing_kwargs
    return dict(value or {})

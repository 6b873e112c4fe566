"""The shapes of a run, resolved in one place."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from posttrain_collators import Padding, plan_shapes
from posttrain_devices import DeviceSpec, device_spec, resolve_pad_multiple

logger = logging.getLogger("posttrain")


@dataclass(frozen=True)
class ShapePlan:
    """What shapes the batches of a run have. `str(plan)` says it in one line.

    Attributes:
        device: The kind of device it is for.
        layout: `"padded"` or `"packed"`; what the model is to be set to.
        packing: Whether a row holds several sequences.
        multiple: Every width is a multiple of this; None for no rounding.
        widths: The only widths that may occur, ascending; None for no limit.
        batch_sizes: Rows that batches are filled up to, with rows of count 0; empty where they may vary.
        static: Whether the forward shapes are known before the first step (and are watched).
        reason: Why this layout, in one line.
    """

    device: str
    layout: str
    packing: bool
    multiple: int | None
    widths: tuple[int, ...] | None
    batch_sizes: tuple[int, ...]
    static: bool
    reason: str = ""

    def __str__(self) -> str:
        rows = "packed rows" if self.packing else "rows"
        if self.widths:
            widths = f"widths {', '.join(map(str, self.widths))}"
        elif self.multiple:
            widths = f"widths in multiples of {self.multiple}"
        else:
            widths = "no padding computed" if self.layout == "packed" else "the width of the longest row"
        size = f" x {' or '.join(map(str, self.batch_sizes))} rows" if self.batch_sizes else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"shapes on {self.device}: {rows}, {self.layout} layout{why}, {widths}{size}"

    def padding(self, pad_id: int, side: str = "right") -> Padding:
        """The padding rule for the collator.

        Args:
            pad_id: The token that fills rows up.
            side: "right" or "left".
        """
        return Padding(pad_id, side=side, multiple_of=self.multiple, widths=self.widths)

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Every `(B, T)` that a forward may see; empty where there is no limit."""
        if not self.static or not self.widths:
            return set()
        return {(rows, width) for rows in self.batch_sizes for width in self.widths}


def resolve_shapes(
    *,
    max_length: int | None,
    batch_size: int,
    packing: bool = False,
    padding_free: bool = False,
    pad_to_multiple_of: int | str | None = "auto",
    max_shapes: int | None = None,
    layout: Any = "padded",
    spec: DeviceSpec | None = None,
    lengths: Iterable[int] | None = None,
) -> ShapePlan:
    """Resolves every option that decides the shapes of batches into one plan.

    * `packing` fills rows of `max_length` with several sequences. They must not see each other: it needs a layout that
      honours boundaries (`packed`), or static shapes, where rows are kept apart by a mask of fixed shape.
    * `padding_free` computes no padding token (the `packed` layout), so its shapes follow the rows.
    * `pad_to_multiple_of` rounds widths up; `max_shapes` picks the widths that waste least for the given lengths.
    * On a device with static shapes (Trainium) batches are filled up to `batch_size` rows and shapes are watched.

    Args:
        max_length: The longest row, T; None if rows are not cut.
        batch_size: Rows of a micro-batch, B.
        packing: Whether rows are packed.
        padding_free: Whether no padding may be computed.
        pad_to_multiple_of: A number, "auto" (by device), None or "none" (no planning).
        max_shapes: The most widths; None is the device's own default.
        layout: What `posttrain_models.choose_layout` returned, or its name. The plan's own `layout` is what the model
            is to be set to: it is "padded" where shapes were limited.
        spec: The device; None is the one here.
        lengths: Row lengths of the data, for widths that fit them; without, widths divide `max_length` evenly.

    Raises:
        ValueError: For options that contradict each other or the device, naming both and what to write instead.

    Example:
        >>> from posttrain_devices import device_spec
        >>> lengths = [100] * 50 + [900] * 5
        >>> print(resolve_shapes(max_length=1000, batch_size=4, spec=device_spec("neuron"), lengths=lengths))
        shapes on neuron: rows, padded layout, widths 128, 1024 x 4 rows
        >>> print(resolve_shapes(max_length=1000, batch_size=4, spec=device_spec("cpu"), layout="packed"))
        shapes on cpu: rows, packed layout, no padding computed
    """
    spec = spec or device_spec()
    name, reason = getattr(layout, "name", layout), getattr(layout, "reason", "")
    multiple = resolve_pad_multiple(pad_to_multiple_of, spec)
    planning = multiple is not None or pad_to_multiple_of == "auto"
    _check(spec, name, reason, packing, padding_free, planning, max_shapes)
    if max_shapes is not None and name == "packed":
        name, reason = "padded", f"max_shapes={max_shapes}"
    widths = None
    if spec.static_shapes and not planning:
        logger.warning(
            "pad_to_multiple_of=None: shapes are not planned, and on %s each new one costs a compilation; "
            "write 'auto' to plan them",
            spec.name,
        )
    else:
        widths = _widths(max_length, packing, multiple or 1, max_shapes or spec.max_shapes, lengths, batch_size)
    static = spec.static_shapes and widths is not None
    return ShapePlan(spec.name, name, packing, multiple, widths, (batch_size,) if static else (), static, reason)


def _check(
    spec: DeviceSpec, name: str, reason: str, packing: bool, padding_free: bool, planning: bool, max_shapes: int | None
) -> None:
    if name not in ("padded", "packed"):
        raise ValueError(f"layout={name!r}: write 'padded' or 'packed'")
    because = f" ({reason})" if reason else ""
    if packing and name != "packed" and not spec.static_shapes:
        raise ValueError(
            f"packing=True needs a layout that keeps the sequences of a row apart, this model runs 'padded'{because}: "
            "write packing=False"
        )
    if padding_free and spec.static_shapes:
        raise ValueError(
            f"padding_free=True makes shapes follow the data, and {spec.name} compiles each shape: write "
            "padding_free=False (packing=True wastes little padding too)"
        )
    if padding_free and name != "packed":
        raise ValueError(f"padding_free=True needs the 'packed' layout, this model runs 'padded'{because}: "
                         "write padding_free=False")  # fmt: skip
    if max_shapes is not None and max_shapes < 1:
        raise ValueError(f"max_shapes={max_shapes}: write a number of at least 1, or leave it out")
    if max_shapes is not None and not planning:
        raise ValueError(
            f"max_shapes={max_shapes} plans shapes and pad_to_multiple_of=None switches planning off: "
            "write pad_to_multiple_of='auto' or a number, or leave max_shapes out"
        )
    if max_shapes is not None and (padding_free or packing) and not spec.static_shapes:
        other = "padding_free" if padding_free else "packing"
        raise ValueError(
            f"{other}=True computes no padding, so its shapes follow the rows, and max_shapes={max_shapes} limits "
            "them: leave one of the two out"
        )


def _widths(
    max_length: int | None,
    packing: bool,
    multiple: int,
    max_shapes: int | None,
    lengths: Iterable[int] | None,
    batch_size: int,
) -> tuple[int, ...] | None:
    if max_shapes is None:
        return None
    if packing:
        if max_length is None:
            raise ValueError("packing=True fills rows of max_length tokens: set max_length")
        return (_up(max_length, multiple),)
    if lengths is not None:
        longest = [min(length, max_length) if max_length else length for length in lengths]
        return plan_shapes(longest, max_shapes, multiple_of=multiple, batch_size=batch_size)
    if max_length is None:
        raise ValueError(
            f"max_shapes={max_shapes}: widths cannot be planned without max_length or the lengths of the rows; "
            "set max_length"
        )
    return tuple(
        sorted({_up(math.ceil(max_length * part / max_shapes), multiple) for part in range(1, max_shapes + 1)})
    )


def _up(length: int, multiple: int) -> int:
    return math.ceil(length / multiple) * multiple


class ShapeWatch:
    """Records the `(B, T)` of every forward and says when one is not in the plan.

    Args:
        plan: The plan; its `shapes` are the ones that are expected.
        strict: Raise instead of warning.

    Attributes:
        seen: Every shape so far, with the number of forwards that had it.

    Example:
        >>> import torch
        >>> from posttrain_trainer import ShapePlan
        >>> from posttrain_trainer.plan import ShapeWatch
        >>> plan = ShapePlan("cpu", "padded", False, 4, (4,), (2,), static=True)
        >>> model = torch.nn.Embedding(8, 2)
        >>> watch = ShapeWatch(plan).attach(model)
        >>> _ = model(torch.zeros(2, 4, dtype=torch.int64))
        >>> watch.seen, watch.unplanned
        ({(2, 4): 1}, set())
    """

    def __init__(self, plan: ShapePlan, *, strict: bool = False) -> None:
        self.plan = plan
        self.strict = strict
        self.seen: dict[tuple[int, ...], int] = {}

    @property
    def unplanned(self) -> set[tuple[int, ...]]:
        """Shapes seen that the plan does not have."""
        return set(self.seen) - self.plan.shapes

    def attach(self, model: torch.nn.Module) -> "ShapeWatch":
        """Watch a model's forwards."""
        model.register_forward_pre_hook(self._record, with_kwargs=True)
        return self

    def _record(self, _model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
        if not isinstance(ids, torch.Tensor):
            return
        shape = tuple(ids.shape[:2])
        known = shape in self.seen
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if known or shape in self.plan.shapes:
            return
        message = f"forward shape {shape} is not in the plan {sorted(self.plan.shapes)}: it costs a compilation"
        if self.strict:
            raise RuntimeError(message)
        logger.warning(message)

"""The shapes of a run, resolved in one place."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from posttrain_collators import Padding, plan_completion_shapes, plan_shapes
from posttrain_devices import DeviceSpec, device_spec, resolve_pad_multiple

logger = logging.getLogger("posttrain")


@dataclass(frozen=True)
class ShapePlan:
    """What shapes the batches of a run have. `str(plan)` says it in one line.

    Attributes:
        device: The kind of device it is for.
        layout: `"padded"`, `"packed"` or `"shared"` (a prompt is computed once for its completions); what the model is
            to be set to.
        packing: Whether a row holds several sequences.
        multiple: Every width is a multiple of this; None for no rounding.
        widths: The only widths that may occur, ascending; None for no limit. Of a `CompletionBatch`, those of
            completions, Tc.
        batch_sizes: Rows (of a `CompletionBatch`: prompts, P) that batches are filled up to, with rows of count 0;
            empty where they may vary.
        static: Whether the forward shapes are known before the first step (and are watched).
        reason: Why this layout, in one line.
        num_completions: G, the completions of a prompt in a `CompletionBatch`; 0 for a `TokenBatch`.
        prompt_widths: The only widths of prompts, Tp; every one may occur with every one of `widths`.
    """

    device: str
    layout: str
    packing: bool
    multiple: int | None
    widths: tuple[int, ...] | None
    batch_sizes: tuple[int, ...]
    static: bool
    reason: str = ""
    num_completions: int = 0
    prompt_widths: tuple[int, ...] | None = None

    def __str__(self) -> str:
        rows = "packed rows" if self.packing else "rows"
        unit, longest = "rows", "the width of the longest row"
        if self.num_completions:
            rows = f"prompts with {self.num_completions} completion{'s' * (self.num_completions > 1)}"
            unit, longest = "prompts", "the widths of the longest prompt and completion"
        if self.widths:
            both = [found for found in (self.prompt_widths, self.widths) if found]
            widths = "widths " + " + ".join(", ".join(map(str, found)) for found in both)
        elif self.multiple:
            widths = f"widths in multiples of {self.multiple}"
        else:
            widths = longest if self.layout == "padded" else "no padding computed"
        size = f" x {' or '.join(map(str, self.batch_sizes))} {unit}" if self.batch_sizes else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"shapes on {self.device}: {rows}, {self.layout} layout{why}, {widths}{size}"

    def padding(self, pad_id: int, side: str = "right") -> Padding:
        """The padding rule for the collator, of completions where there are any.

        Args:
            pad_id: The token that fills rows up.
            side: "right" or "left".
        """
        return Padding(pad_id, side=side, multiple_of=self.multiple, widths=self.widths)

    def prompt_padding(self, pad_id: int) -> Padding:
        """The padding rule of prompts for a collator of completions.

        Args:
            pad_id: The token that fills prompts up, on the left.
        """
        return Padding(pad_id, side="left", multiple_of=self.multiple, widths=self.prompt_widths)

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Every `(B, T)` that a forward may see; empty where there is no limit.

        A `CompletionBatch` is run as `(P * G, Tp + Tc)`, or in the shared layout as `(P, Tp + G * Tc)`.
        """
        if not self.static or not self.widths:
            return set()
        in_a_row = self.num_completions if self.layout == "shared" else 1
        rows_each = self.num_completions // in_a_row if self.num_completions else 1
        return {
            (rows * rows_each, prompt + in_a_row * width)
            for rows in self.batch_sizes
            for prompt in self.prompt_widths or (0,)
            for width in self.widths
        }


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
    rules = _rules(spec, layout, ("packed",), packing, padding_free, pad_to_multiple_of, max_shapes)
    widths = None
    if rules.planned:
        widths = _widths(max_length, packing, rules.multiple or 1, rules.max_shapes, lengths, batch_size)
    return rules.plan(widths, batch_size, packing=packing)


def resolve_completion_shapes(
    *,
    max_length: int | None,
    batch_size: int,
    num_completions: int,
    max_completion_length: int | None = None,
    padding_free: bool = False,
    pad_to_multiple_of: int | str | None = "auto",
    max_shapes: int | None = None,
    layout: Any = "padded",
    spec: DeviceSpec | None = None,
    lengths: Iterable[Sequence[int]] | None = None,
) -> ShapePlan:
    """Resolves every option that decides the shapes of batches of prompts with completions into one plan.

    As `resolve_shapes`, for a `CompletionBatch`: prompts have one width and completions another. `max_shapes` limits
    how many pairs of the two there are, and picks those that waste least for the given lengths.

    Args:
        max_length: The longest prompt; None if prompts are not cut.
        batch_size: Prompts of a micro-batch, P.
        num_completions: Completions of a prompt, G.
        max_completion_length: The longest completion; None for `max_length`.
        padding_free: Whether no padding may be computed.
        pad_to_multiple_of: A number, "auto" (by device), None or "none" (no planning).
        max_shapes: The most pairs of widths; None is the device's own default.
        layout: What `posttrain_models.choose_layout` returned, or its name. The plan's own `layout` is what the model
            is to be set to: it is "padded" where shapes were limited on a device that does not compile for each.
        spec: The device; None is the one here.
        lengths: For each row the length of its prompt, followed by those of its completions; without, widths divide
            the longest lengths evenly.

    Raises:
        ValueError: For options that contradict each other or the device, naming both and what to write instead.

    Example:
        >>> from posttrain_devices import device_spec
        >>> lengths = [(100, 40, 50)] * 50 + [(900, 30, 90)]
        >>> settings = dict(max_length=1024, batch_size=4, num_completions=2, lengths=lengths)
        >>> plan = resolve_completion_shapes(**settings, layout="shared", spec=device_spec("neuron"))
        >>> print(plan)
        shapes on neuron: prompts with 2 completions, shared layout, widths 128, 1024 + 128 x 4 prompts
        >>> sorted(plan.shapes)
        [(4, 384), (4, 1280)]
    """
    rules = _rules(spec, layout, ("packed", "shared"), False, padding_free, pad_to_multiple_of, max_shapes)
    if num_completions < 1:
        raise ValueError(f"num_completions={num_completions}: write how many completions a prompt has, at least 1")
    both: tuple[Any, Any] = (None, None)
    if rules.planned and rules.max_shapes is not None:
        limits = max_length, max_completion_length or max_length
        pairs = _lengths(lengths, limits, num_completions, rules.max_shapes)
        size = 1 if lengths is None else batch_size  # without rows, divide evenly
        prompts, found = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        both = plan_completion_shapes(
            prompts, found, rules.max_shapes, multiple_of=rules.multiple or 1, batch_size=size
        )
    return rules.plan(both[1], batch_size, num_completions=num_completions, prompt_widths=both[0])


class _Rules(NamedTuple):
    """What the options say of any kind of batch, checked."""

    spec: DeviceSpec
    layout: str
    reason: str
    multiple: int | None
    max_shapes: int | None
    planned: bool

    def plan(
        self, widths: tuple[int, ...] | None, batch_size: int, packing: bool = False, **completions: Any
    ) -> ShapePlan:
        static = self.spec.static_shapes and widths is not None
        sizes = (batch_size,) if static else ()
        return ShapePlan(
            self.spec.name, self.layout, packing, self.multiple, widths, sizes, static, self.reason, **completions
        )


def _rules(
    spec: DeviceSpec | None,
    layout: Any,
    free: tuple[str, ...],
    packing: bool,
    padding_free: bool,
    pad_to_multiple_of: int | str | None,
    max_shapes: int | None,
) -> _Rules:
    """The part of the resolution that all kinds of batches have in common; `free` layouts compute no padding."""
    spec = spec or device_spec()
    name, reason = getattr(layout, "name", layout), getattr(layout, "reason", "")
    if name not in ("padded", *free):
        known = " or ".join(repr(layout) for layout in ("padded", *free))
        raise ValueError(f"layout={name!r}: write {known}")
    multiple = resolve_pad_multiple(pad_to_multiple_of, spec)
    planning = multiple is not None or pad_to_multiple_of == "auto"
    _check(spec, name, reason, free, packing, padding_free, planning, max_shapes)
    if max_shapes is not None and name in free and not spec.static_shapes:
        name, reason = "padded", f"max_shapes={max_shapes}"
    planned = planning or not spec.static_shapes
    if not planned:
        logger.warning(
            "pad_to_multiple_of=None: shapes are not planned, and on %s each new one costs a compilation; "
            "write 'auto' to plan them",
            spec.name,
        )
    return _Rules(spec, name, reason, multiple, max_shapes or spec.max_shapes, planned)


def _check(
    spec: DeviceSpec,
    name: str,
    reason: str,
    free: tuple[str, ...],
    packing: bool,
    padding_free: bool,
    planning: bool,
    max_shapes: int | None,
) -> None:
    because = f" ({reason})" if reason else ""
    if packing and name != "packed" and not spec.static_shapes:
        raise ValueError(
            f"packing=True needs a layout that keeps the sequences of a row apart, this model runs 'padded'{because}: "
            "write packing=False"
        )
    if padding_free and spec.static_shapes:
        raise ValueError(
            f"padding_free=True makes shapes follow the data, and {spec.name} compiles each shape: write "
            f"padding_free=False{'' if 'shared' in free else ' (packing=True wastes little padding too)'}"
        )
    if padding_free and name == "padded":
        needed = " or ".join(repr(layout) for layout in free)
        raise ValueError(
            f"padding_free=True needs the {needed} layout, this model runs 'padded'{because}: write padding_free=False"
        )
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


def _lengths(
    lengths: Iterable[Sequence[int]] | None,
    limits: tuple[int | None, int | None],
    num_completions: int,
    max_shapes: int,
) -> list[tuple[int, list[int]]]:
    """For each row the length of its prompt and those of its completions; without rows, lengths up to the limits."""
    longest, longest_completion = limits
    if lengths is not None:
        return [
            (
                min(prompt, longest) if longest else prompt,
                [min(length, longest_completion) if longest_completion else length for length in found],
            )
            for prompt, *found in lengths
        ]
    if longest is None or longest_completion is None:
        raise ValueError(
            f"max_shapes={max_shapes}: widths cannot be planned without max_length or the lengths of the rows; "
            "set max_length"
        )
    parts = 64  # enough for the few widths that a plan has
    return [
        (math.ceil(longest * part / parts), [math.ceil(longest_completion * part / parts)] * num_completions)
        for part in range(1, parts + 1)
    ]


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

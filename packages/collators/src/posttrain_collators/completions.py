"""Prompts with their completions to one batch of two fixed widths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from posttrain_collators.padding import Padding, as_list, pad_sequences


class CompletionBatch(NamedTuple):
    """P prompts with G completions each. Prompt tokens are context, completion tokens are scored.

    Prompts are padded on the left and completions on the right, so that a prompt followed by one of its completions is
    contiguous. A completion whose mask is all False is a filler (it is not there); so is a row of such completions.

    Attributes:
        prompts: `(P, Tp)` int64. Tp is 0 where no row has a prompt and no width was planned.
        prompt_mask: `(P, Tp)` bool, True at tokens of the prompt.
        completions: `(P, G, Tc)` int64.
        completion_mask: `(P, G, Tc)` bool, True at tokens of the completion.
        extras: A NamedTuple of what else a method needs (`PairExtras`, `FeedbackExtras`, advantages, ...): tensors
            whose first dimension is P, or None. None where it needs nothing.
    """

    prompts: torch.Tensor
    prompt_mask: torch.Tensor
    completions: torch.Tensor
    completion_mask: torch.Tensor
    extras: Any = None


class PairExtras(NamedTuple):
    """What a batch of preference pairs may hold besides tokens.

    Attributes:
        margins: `(P,)` float32, by how much the chosen completion is better; None where no row says.
        reference_logps: `(P, 2, Tc)` float32, log-probabilities of the completion tokens under the reference model, in
            nats, 0 on padding; None where they were not computed beforehand.
    """

    margins: torch.Tensor | None = None
    reference_logps: torch.Tensor | None = None


class FeedbackExtras(NamedTuple):
    """What a batch of completions that were judged alone holds besides tokens.

    Attributes:
        labels: `(P,)` bool, whether the completion is desirable; False at filler rows.
        reference_logps: `(P, 1, Tc)` float32, as in `PairExtras`.
    """

    labels: torch.Tensor
    reference_logps: torch.Tensor | None = None


def pad_completions(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    prompt_padding: Padding,
    completion_padding: Padding,
    *,
    num_completions: int,
    size: int | None = None,
) -> CompletionBatch:
    """Put prompts and their completions, as token ids, into a `CompletionBatch` without extras.

    A row without prompt in which a completion is missing too gets one pad token as its prompt, so that there is
    something to attend to wherever a model runs it.

    Args:
        prompts: P prompts; empty ones are allowed.
        completions: For each prompt at most G completions; empty ones are fillers, and fillers make up the number.
        prompt_padding: The pad token and widths of prompts. Its `side` is not read: prompts are padded on the left.
        completion_padding: The same for completions, which are padded on the right.
        num_completions: G.
        size: P of the result. Filler rows (one pad token as prompt, no completion) make up the number.

    Raises:
        ValueError: For more rows than `size`, no rows at all, or a row with too many completions or tokens.

    Example:
        >>> padding = Padding(pad_id=0)
        >>> batch = pad_completions([[1, 2], [3]], [[[4], [5, 6]], [[7, 8]]], padding, padding, num_completions=2)
        >>> batch.prompts.tolist()
        [[1, 2], [0, 3]]
        >>> batch.completions.tolist()
        [[[4, 0], [5, 6]], [[7, 8], [0, 0]]]
        >>> batch.completion_mask.sum(-1).tolist()
        [[1, 2], [2, 0]]
    """
    rows = _fit(len(prompts), size)
    for index, found in enumerate(completions):
        if len(found) > num_completions:
            raise ValueError(
                f"completions[{index}] has {len(found)} entries, more than num_completions={num_completions}."
            )
    filled = [[*found, *[[]] * (num_completions - len(found))] for found in completions]
    filled += [[[]] * num_completions] * (rows - len(filled))
    something = [[prompt_padding.pad_id]]
    contexts = [
        prompt if len(prompt) or all(len(one) for one in found) else something[0]
        for prompt, found in zip([*prompts, *something * (rows - len(prompts))], filled, strict=True)
    ]
    flat = [one for found in filled for one in found]  # P * G
    prompt_width = _width(prompt_padding, contexts, "prompt")
    width = _width(completion_padding, flat, "completion", num_completions)
    return CompletionBatch(
        prompts=pad_sequences(contexts, prompt_padding.pad_id, prompt_width, side="left"),
        prompt_mask=_mask(contexts, prompt_width, "left"),
        completions=pad_sequences(flat, completion_padding.pad_id, width).view(rows, num_completions, width),
        completion_mask=_mask(flat, width, "right").view(rows, num_completions, width),
    )


def _fit(found: int, size: int | None) -> int:
    size = found if size is None else size
    if size < 1:
        raise ValueError("rows is empty: pass at least one row, or `size` for a batch of filler rows.")
    if found > size:
        raise ValueError(f"size={size} is less than the {found} rows: pass fewer rows, or a larger size.")
    return size


def _width(padding: Padding, rows: Sequence[Sequence[int]], what: str, each: int = 1) -> int:
    longest = max(len(row) for row in rows)
    if longest == 0 and what == "prompt" and padding.widths is None:
        return 0
    try:
        return padding.width(longest)
    except ValueError as error:
        index = next(index for index, row in enumerate(rows) if len(row) == longest)
        raise ValueError(f"rows[{index // each}], {what}: {error}") from None


def _mask(rows: Sequence[Sequence[int]], width: int, side: str) -> torch.Tensor:
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    places = torch.arange(width)
    return places < lengths if side == "right" else places >= width - lengths


class _Collator:
    def __init__(self, prompt_padding: Padding | int, completion_padding: Padding | int | None = None) -> None:
        if completion_padding is None:
            completion_padding = prompt_padding
        self.prompt_padding = prompt_padding if isinstance(prompt_padding, Padding) else Padding(prompt_padding)
        self.completion_padding = (
            completion_padding if isinstance(completion_padding, Padding) else Padding(completion_padding)
        )

    def _tokens(
        self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], size: int | None
    ) -> tuple[CompletionBatch, list[list[list[int]]]]:
        """The batch without extras, and the completions by row."""
        prompts = [as_list(row["prompt_ids"]) if row.get("prompt_ids") is not None else [] for row in rows]
        completions = [[as_list(_value(index, row, column)) for column in columns] for index, row in enumerate(rows)]
        batch = pad_completions(
            prompts,
            completions,
            self.prompt_padding,
            self.completion_padding,
            num_completions=len(columns),
            size=size,
        )
        return batch, completions


class PreferenceCollator(_Collator):
    """Turn tokenised preference pairs into a `CompletionBatch` with G=2: `[:, 0]` chosen, `[:, 1]` rejected.

    A row is a mapping with
    - `prompt_ids`: the tokens of the prompt; without it the pair has no prompt;
    - `chosen_ids`, `rejected_ids`: the tokens of the completions, their end-of-turn tokens included;
    - `margin` (optional): a number, by how much the chosen completion is better;
    - `chosen_reference_logps`, `rejected_reference_logps` (optional): a log-probability for each of those tokens.

    Optional columns are given by all rows of a batch or by none. Other keys are ignored. A row counts where both of its
    completions have a token, that is, `completion_mask.any(-1).all(-1)`; `extras` is a `PairExtras`.

    Args:
        prompt_padding: The pad token and widths of prompts, or just the pad token. Its `side` is not read: prompts are
            padded on the left, completions on the right.
        completion_padding: The same for completions; None takes that of prompts.

    Example:
        >>> collate = PreferenceCollator(0)
        >>> batch = collate([{"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [7]}])
        >>> batch.prompts.tolist(), batch.completions.tolist()
        ([[5, 6]], [[[7, 8, 9], [7, 0, 0]]])
        >>> batch.completion_mask.int().tolist()
        [[[1, 1, 1], [1, 0, 0]]]
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]], size: int | None = None) -> CompletionBatch:
        """Collate `rows`.

        Args:
            rows: The rows; may be empty if `size` is given.
            size: P. Filler rows (one pad token as prompt, no completion) make up the number.

        Raises:
            ValueError: For more rows than `size`, no rows at all, or a row that lacks a column or contradicts itself,
                naming row and column.
        """
        batch, completions = self._tokens(rows, ("chosen_ids", "rejected_ids"), size)
        margins = None
        if _given(rows, ("margin",)):
            margins = torch.zeros(len(batch.prompts), dtype=torch.float32)
            for index, row in enumerate(rows):
                margins[index] = _number(index, row, "margin")
        names = ("chosen_reference_logps", "rejected_reference_logps")
        return batch._replace(extras=PairExtras(margins, _reference_logps(rows, names, completions, batch)))


class FeedbackCollator(_Collator):
    """Turn tokenised completions that were judged one by one into a `CompletionBatch` with G=1.

    A row is a mapping with
    - `prompt_ids`: the tokens of the prompt; without it the completion has no prompt;
    - `completion_ids`: the tokens of the completion, its end-of-turn token included;
    - `label`: True where it is desirable, False where it is not;
    - `reference_logps` (optional, by all rows of a batch or by none): a log-probability for each completion token.

    Other keys are ignored. A row counts where its completion has a token; `extras` is a `FeedbackExtras`.

    Args:
        prompt_padding: As for `PreferenceCollator`.
        completion_padding: As for `PreferenceCollator`.

    Example:
        >>> collate = FeedbackCollator(Padding(0, multiple_of=4))
        >>> batch = collate([{"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "label": True}])
        >>> batch.prompts.tolist(), batch.completions.tolist(), batch.extras.labels.tolist()
        ([[0, 0, 5, 6]], [[[7, 8, 9, 0]]], [True])
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]], size: int | None = None) -> CompletionBatch:
        """Collate `rows`.

        Args:
            rows: The rows; may be empty if `size` is given.
            size: P. Filler rows (one pad token as prompt, no completion, label False) make up the number.

        Raises:
            ValueError: As for `PreferenceCollator`.
        """
        batch, completions = self._tokens(rows, ("completion_ids",), size)
        labels = torch.zeros(len(batch.prompts), dtype=torch.bool)
        for index, row in enumerate(rows):
            label = _value(index, row, "label")
            if label not in (True, False):
                raise ValueError(f"rows[{index}]: label={label!r} is neither True nor False.")
            labels[index] = bool(label)
        logps = _reference_logps(rows, ("reference_logps",), completions, batch)
        return batch._replace(extras=FeedbackExtras(labels, logps))


def _value(index: int, row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column)
    if value is None:
        raise ValueError(f"rows[{index}] has no {column}; its keys are {sorted(row)}.")
    return value


def _number(index: int, row: Mapping[str, Any], column: str) -> float:
    value = row[column]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"rows[{index}]: {column}={value!r} is not a finite number.")
    return number


def _given(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    """Whether the rows have optional columns: all of them all, or none any."""
    there = [(index, column) for index, row in enumerate(rows) for column in columns if row.get(column) is not None]
    if there and len(there) < len(rows) * len(columns):
        found = set(there)
        index, column = next(
            (index, column) for index in range(len(rows)) for column in columns if (index, column) not in found
        )
        raise ValueError(
            f"rows[{index}] has no {column}, but rows[{there[0][0]}] has {there[0][1]}: give every row "
            f"{' and '.join(columns)}, or none."
        )
    return bool(there)


def _reference_logps(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    completions: Sequence[Sequence[Sequence[int]]],
    batch: CompletionBatch,
) -> torch.Tensor | None:
    if not _given(rows, columns):
        return None
    flat: list[Any] = []
    for index, (row, found) in enumerate(zip(rows, completions, strict=True)):
        for column, completion in zip(columns, found, strict=True):
            values = as_list(row[column])
            if len(values) != len(completion):
                raise ValueError(
                    f"rows[{index}]: {column} has {len(values)} values for {len(completion)} completion tokens: write "
                    "one for each."
                )
            flat.append(values)
    shape = batch.completions.shape
    flat += [[]] * (shape[0] * shape[1] - len(flat))
    return pad_sequences(flat, 0.0, shape[2], dtype=torch.float32).view(shape)

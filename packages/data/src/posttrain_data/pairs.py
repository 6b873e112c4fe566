"""Preference pairs and feedback in any of the known formats to completions of one prompt.

Errors here are `DataError`s without the row number, which the caller knows and adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain_data.errors import DataError, names, nearest
from posttrain_data.formats import Chat, Text, describe, parse_ids, parse_list, parse_row, parse_side

SIDES = ("chosen", "rejected")
PROMPTED = ("messages", "conversations", "prompt", "completion", "instruction")


class Given(NamedTuple):
    """What a row says of one prompt.

    Attributes:
        sides: Its completions, each as text, conversation or token ids.
        prompt_ids: The prompt of token ids; None where they have none.
        references: Log-probabilities under a reference model for each token of each side, None for those without.
        labels: Whether each side is good.
        margin: By how much the first is better.
    """

    sides: list[Text | Chat | list[int]]
    prompt_ids: list[int] | None = None
    references: Sequence[list[float] | None] = ()
    labels: Sequence[bool] = ()
    margin: float | None = None


def parse_pair(row: Mapping[str, Any], roles: frozenset[str]) -> Given:
    """A row with a chosen and a rejected side, in this order; `prompt_length` of conversations is always set."""
    row = {key: value for key, value in row.items() if value is not None}
    margin = _number(row["margin"], "margin") if "margin" in row else None
    references = [_logps(row, f"{side}_reference_logps") for side in SIDES]
    if "chosen_ids" in row or "rejected_ids" in row:
        _both(row, "chosen_ids", "rejected_ids")
        prompt = parse_ids(row, "prompt_ids") if "prompt_ids" in row else None
        return Given([parse_ids(row, f"{side}_ids") for side in SIDES], prompt, references, (True, False), margin)
    _both(row, *SIDES)
    chosen, rejected = (parse_side(row, side, roles) for side in SIDES)
    if isinstance(chosen, Chat) and isinstance(rejected, Chat):
        if chosen.prompt_length is None or rejected.prompt_length is None:
            shared = shared_length(chosen.messages[:-1], rejected.messages[:-1])  # each keeps one as its completion
            chosen, rejected = chosen._replace(prompt_length=shared), rejected._replace(prompt_length=shared)
    elif isinstance(chosen, Chat) or isinstance(rejected, Chat):
        raise DataError(
            f"columns 'chosen' and 'rejected' hold {describe(row['chosen'])} and {describe(row['rejected'])}: write "
            "two strings or two lists of messages."
        )
    return Given([chosen, rejected], None, references, (True, False), margin)


def parse_feedback(row: Mapping[str, Any], roles: frozenset[str]) -> Given:
    """A row with one completion and its label, or a pair: the chosen side is good, the rejected one is not."""
    row = {key: value for key, value in row.items() if value is not None}
    if any(key in row for key in ("chosen", "rejected", "chosen_ids", "rejected_ids")):
        return parse_pair(row, roles)
    if "completion_ids" in row:
        prompt = parse_ids(row, "prompt_ids") if "prompt_ids" in row else []
        ids = parse_ids(row, "completion_ids")
        return Given([ids], prompt, [_logps(row, "reference_logps")], [_label(row)])
    if not any(key in row for key in PROMPTED):
        raise DataError(
            f"no known format: its columns are {names(row)}. Write 'prompt', 'completion' and 'label'; 'messages' and "
            "'label'; 'chosen' and 'rejected'; or 'prompt_ids', 'completion_ids' and 'label'."
        )
    label = _label(row)
    side = parse_row({key: value for key, value in row.items() if key != "input_ids"}, "text", roles)
    if isinstance(side, Chat) and side.prompt_length is None:
        if side.messages[-1]["role"] != "assistant":
            raise DataError(
                f"the last message is from {side.messages[-1]['role']!r}: the label is about the last message, which "
                "has to be the assistant's."
            )
        side = side._replace(prompt_length=len(side.messages) - 1)
    assert isinstance(side, Text | Chat)
    return Given([side], None, [_logps(row, "reference_logps")], [label])


def _both(row: Mapping[str, Any], chosen: str, rejected: str) -> None:
    for column, other in ((chosen, rejected), (rejected, chosen)):
        if column in row:
            continue
        close = next((key for key in row if key != other and nearest(key, [column])), None)
        hint = f" ({close!r} looks like it)" if close else ""
        if "label" in row and other not in row:
            hint = " (rows with a 'label' are feedback on one completion: KTO takes them)"
        raise DataError(f"column {column!r} is missing{hint}: its columns are {names(row)}.")


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _label(row: Mapping[str, Any]) -> bool:
    if "label" not in row:
        close = next((key for key in row if nearest(key, ["label", "labels"])), None)
        hint = f" ({close!r} looks like it)" if close else ""
        raise DataError(
            f"column 'label' is missing{hint}: its columns are {names(row)}. Write True for a good completion and "
            "False for a bad one."
        )
    label = row["label"].item() if hasattr(row["label"], "item") else row["label"]
    if isinstance(label, bool) or label in (0, 1):
        return bool(label)
    raise DataError(f"column 'label' holds {describe(label)}: write True or False.")


def _number(value: Any, column: str) -> float:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"column {column!r} holds {describe(value)}: write a finite number.")
    return float(value)


def _logps(row: Mapping[str, Any], column: str) -> list[float] | None:
    if column not in row:
        return None
    return [_number(value, column) for value in parse_list(row[column])]

"""What shapes prepared rows, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from posttrain_data.errors import DataError


@dataclass(frozen=True)
class DataOptions:
    """What every preparation is told."""

    max_length: int | None = 1024
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    num_proc: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _one_of("truncation_mode", self.truncation_mode, ("keep_start", "keep_end"))
        if self.max_length is not None and self.max_length < 2:
            raise DataError(
                f"max_length={self.max_length}: write at least 2 (the first token is never a target) or None."
            )
        if self.num_proc is not None and self.num_proc < 1:
            raise DataError(f"num_proc={self.num_proc}: write a positive number of processes, or None.")


@dataclass(frozen=True)
class SFTDataOptions(DataOptions):
    """How rows become token ids and targets for supervised fine-tuning.

    Attributes:
        max_length: Tokens a row may have; longer rows are cut. None cuts nothing. With packing, the capacity of a row.
        truncation_mode: "keep_start" or "keep_end": which end of an over-long row stays.
        completion_only: Only the completion is a target. None: for rows that have a prompt and a completion.
        assistant_only: Only assistant turns (with the tokens that end them) are targets. Conversations only.
        train_on: With `assistant_only` or a conversational completion: "all" assistant turns, or only the "last".
        text_field: The column of plain text.
        packing: Put several rows into one of at most `max_length` tokens.
        packing_strategy: "bfd" (best-fit decreasing, over-long rows cut), "bfd_split" (over-long rows split) or
            "wrapped" (rows end to end, cut every `max_length` tokens).
        num_proc: Processes that prepare rows; None is this one alone.
        formatting_func: Called with each row; returns its text, or its messages.
        chat_template_kwargs: Variables for the chat template; a row's own `chat_template_kwargs` win.

    Example:
        >>> from posttrain_data import SFTDataOptions
        >>> SFTDataOptions(max_length=512, assistant_only=True).train_on
        'all'
    """

    completion_only: bool | None = None
    assistant_only: bool = False
    train_on: Literal["all", "last"] = "all"
    text_field: str = "text"
    packing: bool = False
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    formatting_func: Callable[[dict[str, Any]], str | list[dict[str, Any]]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("train_on", self.train_on, ("all", "last"))
        _one_of("packing_strategy", self.packing_strategy, ("bfd", "bfd_split", "wrapped"))
        if self.packing and self.max_length is None:
            raise DataError("packing=True needs max_length, the number of tokens in a packed row: write a number.")
        if self.train_on == "last" and not self.assistant_only and self.completion_only is False:
            raise DataError("train_on='last' picks among assistant turns: write assistant_only=True with it.")
        if self.formatting_func is not None and self.completion_only:
            raise DataError(
                "completion_only=True needs 'prompt' and 'completion', which formatting_func does not return: "
                "drop one of the two."
            )


@dataclass(frozen=True)
class PreferenceDataOptions(DataOptions):
    """How rows become prompts and completions, for preference pairs and for feedback on single completions.

    Attributes:
        max_length: Tokens that a prompt and its completion may have together; see `overlong`. None cuts nothing.
        truncation_mode: What is cut of longer rows. "keep_start": the end of the completions; rows whose prompt leaves
            no room for one are dropped. "keep_end": the start of the prompt, which stays the same for both
            completions; rows whose completion leaves no room for it are dropped.
        overlong: "truncate" cuts longer rows as `truncation_mode` says; "drop" leaves them out (for reward models,
            which would otherwise judge texts without their end).
        num_proc: Processes that prepare rows; None is this one alone.
        chat_template_kwargs: Variables for the chat template; a row's own `chat_template_kwargs` win.

    Example:
        >>> from posttrain_data import PreferenceDataOptions
        >>> PreferenceDataOptions(max_length=512, overlong="drop").truncation_mode
        'keep_start'
    """

    overlong: Literal["truncate", "drop"] = "truncate"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("overlong", self.overlong, ("truncate", "drop"))


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DataError(f"{name}={value!r} is unknown: write {' or '.join(map(repr, allowed))}.")


NO_TARGET = "no target token"
ALL_CUT = "every target beyond max_length"
EMPTY = "no token"
PROMPT_FILLS = "a prompt that fills max_length"
COMPLETION_FILLS = "a completion that fills max_length"
OVERLONG = "a side longer than max_length"
NO_COMPLETION = "an empty completion"
TOO_LONG = {ALL_CUT, PROMPT_FILLS, COMPLETION_FILLS, OVERLONG}


@dataclass
class Report:
    """What preparation did with every row; `str(report)` says it in a line or a few.

    For a streamed data set it grows while rows are read (in the process that reads them).

    Attributes:
        name: The data set.
        rows_in: Rows read; a pair that is taken apart counts as two.
        rows_kept: Rows with at least one target.
        dropped: Rows left out, by reason.
        truncated_rows: Kept rows that were cut to `max_length`.
        tokens: Tokens in the kept rows; a prompt of two completions counts once.
        target_tokens: Those that are targets, which all tokens of a completion are.
        cut_tokens: Tokens cut from kept rows.
        packed_rows: Rows after packing; None without packing.
        capacity: Tokens that a packed row may hold.
        notes: What else the reader should know, one sentence each.

    Example:
        >>> from posttrain_data import prepare_sft, tiny_tokenizer
        >>> report = prepare_sft([{"text": "one two"}, {"text": ""}], tiny_tokenizer(), cache_dir=False).report
        >>> report.rows_in, report.rows_kept, report.dropped
        (2, 1, {'no token': 1})
    """

    name: str = "train"
    rows_in: int = 0
    rows_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated_rows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    cut_tokens: int = 0
    packed_rows: int | None = None
    capacity: int | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        line = f"{self.name}: {self.rows_in:,} rows"
        if self.dropped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
            line += f", {self.rows_kept:,} kept, {sum(self.dropped.values()):,} dropped ({reasons})"
        share = self.target_tokens / self.tokens if self.tokens else 0.0
        line += f"; {self.tokens:,} tokens, {self.target_tokens:,} of them targets ({share:.1%})"
        if self.truncated_rows or self.cut_tokens:
            line += f"; {self.truncated_rows:,} rows cut, {self.cut_tokens:,} tokens lost"
        if self.packed_rows is not None and self.capacity:
            full = self.tokens / max(1, self.packed_rows * self.capacity)
            line += f"; packed into {self.packed_rows:,} rows of {self.capacity:,} ({full:.1%} full)"
        return "\n".join([line, *(f"{self.name}: {note}" for note in self.notes)])


class Prepared(NamedTuple):
    """Rows ready to train on.

    Attributes:
        dataset: Rows. For supervised fine-tuning `{"input_ids": list[int], "loss_mask": list[bool]}`, and
            `"seq_lengths": list[int]` when packed; `loss_mask` is True where the token itself is a target, which the
            first token of a sequence never is. The other preparations say what their rows hold.
        report: What became of the rows that went in.
    """

    dataset: Any
    report: Report

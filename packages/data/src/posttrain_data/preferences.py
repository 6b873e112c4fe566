"""Rows for the methods that compare or judge completions: a prompt, and one or two completions of it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from posttrain_data.errors import DataError
from posttrain_data.formats import Chat, Text
from posttrain_data.options import (
    COMPLETION_FILLS,
    NO_COMPLETION,
    OVERLONG,
    PROMPT_FILLS,
    PreferenceDataOptions,
    Prepared,
)
from posttrain_data.pairs import SIDES, Given, parse_feedback, parse_pair, shared_length
from posttrain_data.prepare import prepare
from posttrain_data.rows import Draft, Piece, Row, RowMaker, Work
from posttrain_data.spans import Conversation, TurnError, turn_spans

IDS = datasets.List(datasets.Value("int32"))
LOGPS = datasets.List(datasets.Value("float32"))


def prepare_preferences(
    dataset: Any,
    tokenizer: Any,
    options: PreferenceDataOptions | None = None,
    cache_dir: str | Path | bool | None = None,
    name: str = "train",
) -> Prepared:
    """Prepares preference pairs: for DPO and its kin, and for reward models with `overlong="drop"`.

    A row has `chosen` and `rejected`, two strings or two lists of messages (one message may stand alone), after
    `prompt`, `conversations` or `messages`; or after `instruction` and `input`. Without any of these the prompt is what
    both sides begin with: messages of conversations, tokens of strings. `tools`, `system` and `chat_template_kwargs`
    belong to conversations. Token ids stand in `prompt_ids`, `chosen_ids` and `rejected_ids`. `margin` is a number.

    The prompt is rendered as a sampler gets it, with what opens the assistant's turn, and must be what the rendered
    conversation begins with; the completion is what follows, to the tokens that end its last turn, all of it targets.
    Strings end with `eos_token`. A token that holds both the end of the prompt and the start of the completion belongs
    to the completion. Rows are cached, and streams prepared while they are read, as `prepare_sft` does.

    Args:
        dataset: `datasets.Dataset`, `datasets.IterableDataset`, or a list of dicts.
        tokenizer: A tokenizer, or a processor that holds one.
        options: How; the defaults of `PreferenceDataOptions` when None.
        cache_dir: Folder for prepared rows; None is `posttrain` in the cache of `datasets`, False keeps them in memory.
        name: Name of the data set in messages.

    Returns:
        Rows `{"prompt_ids", "chosen_ids", "rejected_ids"}` (lists of token ids), with `"margin"` and
        `"chosen_reference_logps"`, `"rejected_reference_logps"` where the given rows have them; and the report.

    Raises:
        DataError: For the first row that cannot be used, naming data set, row and column; an empty data set; no row
            left.

    Example:
        >>> from posttrain_data import prepare_preferences, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> rows = [{"prompt": [{"role": "user", "content": "2+2"}],
        ...          "chosen": [{"role": "assistant", "content": "4"}],
        ...          "rejected": [{"role": "assistant", "content": "5"}]}]
        >>> row = prepare_preferences(rows, tokenizer, cache_dir=False).dataset[0]
        >>> [tokenizer.decode(row[key]) for key in ("prompt_ids", "chosen_ids", "rejected_ids")]
        ['<|im_start|>user\\n2+2<|im_end|>\\n<|im_start|>assistant\\n', '4<|im_end|>', '5<|im_end|>']
    """
    return prepare(PreferenceRows(tokenizer, options or PreferenceDataOptions(), name), dataset, cache_dir)


def prepare_feedback(
    dataset: Any,
    tokenizer: Any,
    options: PreferenceDataOptions | None = None,
    cache_dir: str | Path | bool | None = None,
    name: str = "train",
) -> Prepared:
    """Prepares completions with a label each, for KTO.

    A row has `prompt` and `completion` (two strings or two lists of messages) and `label`, True for a good completion;
    or `messages`, `conversations`, or `instruction`, `input`, `output` and `label`, which is about the last turn; or
    `prompt_ids`, `completion_ids` and `label`. Rows of `prepare_preferences` are taken apart: the chosen side becomes a
    good row, the rejected one a bad row right after it. All else is as `prepare_preferences` says.

    Args:
        dataset: `datasets.Dataset`, `datasets.IterableDataset`, or a list of dicts.
        tokenizer: A tokenizer, or a processor that holds one.
        options: How; the defaults of `PreferenceDataOptions` when None.
        cache_dir: Folder for prepared rows; None is `posttrain` in the cache of `datasets`, False keeps them in memory.
        name: Name of the data set in messages.

    Returns:
        Rows `{"prompt_ids", "completion_ids", "label"}`, with `"reference_logps"` where the given rows have them; and
        the report.

    Raises:
        DataError: For the first row that cannot be used, naming data set, row and column; an empty data set; no row
            left.

    Example:
        >>> from posttrain_data import prepare_feedback, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> rows = [{"prompt": "2+2=", "completion": "4", "label": True},
        ...         {"prompt": "2+3=", "chosen": "5", "rejected": "6"}]
        >>> dataset, report = prepare_feedback(rows, tokenizer, cache_dir=False)
        >>> [(tokenizer.decode(row["completion_ids"]), row["label"]) for row in dataset]
        [('4<|im_end|>', True), ('5<|im_end|>', True), ('6<|im_end|>', False)]
    """
    return prepare(FeedbackRows(tokenizer, options or PreferenceDataOptions(), name), dataset, cache_dir)


class Completions(NamedTuple):
    """Token ids of a prompt and of its completions, with their reference log-probabilities; `dropped` says why not."""

    prompt: list[int]
    sides: list[list[int]]
    references: list[list[float] | None]
    dropped: str | None = None
    cut: int = 0

    def row(self, columns: Mapping[str, Any], notes: set[str]) -> Row:
        """The prepared row of these columns, without those that are None."""
        if self.dropped:
            return Row({}, self.dropped, notes=notes)
        targets = sum(map(len, self.sides))
        columns = {"prompt_ids": self.prompt, **{key: value for key, value in columns.items() if value is not None}}
        return Row(columns, None, len(self.prompt) + targets, targets, self.cut, notes=notes)


class CompletionRows(RowMaker):
    """What pairs and feedback share: where the prompt ends, and how rows are cut."""

    lacking = "completion"
    question = "Are the completions empty?"
    options: PreferenceDataOptions

    @abstractmethod
    def parse(self, row: Mapping[str, Any]) -> Given:
        """The completions of a row."""

    @abstractmethod
    def made(self, given: Given, whole: Completions, notes: set[str]) -> list[Row]:
        """The rows that come of them."""

    def work(self, row: Mapping[str, Any]) -> Work:
        """Recognises a row, and renders its sides."""
        given = self.parse(row)
        return Work([self._draft(side) for side in given.sides if not isinstance(side, list)], given)

    def _draft(self, side: Text | Chat) -> Draft:
        if isinstance(side, Text):
            spans = None if side.prompt is None else [(len(side.prompt), len(side.text))]
            return self.text_draft(side.text, spans)
        draft = self.chat_draft(side)
        role = side.messages[-1]["role"]
        if role != "assistant":
            draft.notes.add(f"completions end with a {role!r} message: nothing is left to the assistant")
        return draft

    def spans(self, chat: Chat, kwargs: Mapping[str, Any], text: str) -> list[tuple[int, int]]:
        """What follows the prompt as a sampler gets it, to the end of the last assistant turn."""
        first = chat.prompt_length or 0
        conversation = Conversation(self.renderer, chat.messages, chat.tools, kwargs, text)
        start = _prompt_end(conversation, first)
        wanted = [n for n, message in enumerate(chat.messages) if n >= first and message["role"] == "assistant"]
        try:
            turns = turn_spans(conversation, wanted, start if first and first in wanted else None)
        except TurnError as error:
            raise DataError(f"{error.reason} Remove that part, or give the turns as rows of their own.") from None
        answered = chat.messages[-1]["role"] == "assistant"
        return [(start, max(turn.stop for turn in turns) if answered else len(text))]

    def rows(self, work: Work, pieces: Sequence[Piece]) -> list[Row]:
        """Splits the tokens of every side into the prompt, which they share, and the completion."""
        given: Given = work.rest
        if pieces:
            sides = [piece.ids[: _last(piece.mask)] for piece in pieces]
            known = all(draft.spans is not None for draft in work.drafts)
            start = min(_first(piece.mask) for piece in pieces) if known else None
        else:
            prompt = given.prompt_ids or []
            sides = [[*prompt, *side] for side in given.sides if isinstance(side, list)]
            start = None if given.prompt_ids is None else len(prompt)
            for column, ids in zip(("prompt_ids", *_columns(sides, "ids")), (prompt, *sides), strict=True):
                self.check_ids(ids, column)
        shared = shared_length(sides[0], sides[-1])
        end = min(shared if start is None else start, shared)
        if start is None:
            end = max(0, min(end, *(len(side) - 1 for side in sides)))
        whole = Completions(sides[0][:end], [side[end:] for side in sides], list(given.references))
        _check_references(whole, start is not None)
        return self.made(given, whole, _notes(pieces, whole))

    def fit(self, whole: Completions) -> Completions:
        """Cut to `max_length` or dropped, as the options say."""
        prompt, sides, limit = whole.prompt, whole.sides, self.options.max_length
        longest = max(map(len, sides))
        if not all(sides):
            return whole._replace(dropped=NO_COMPLETION)
        if limit is None or len(prompt) + longest <= limit:
            return whole
        if self.options.overlong == "drop":
            return whole._replace(dropped=OVERLONG)
        if self.options.truncation_mode == "keep_start":
            room = limit - len(prompt)
            if room < 1:
                return whole._replace(dropped=PROMPT_FILLS)
            references = [logps and logps[:room] for logps in whole.references]
            cut = Completions(prompt, [side[:room] for side in sides], references)
        else:
            room = limit - longest
            if prompt and room < 1:
                return whole._replace(dropped=COMPLETION_FILLS)
            if any(whole.references):
                raise DataError(
                    "reference log-probabilities are of the whole prompt, which truncation_mode='keep_end' would cut: "
                    "raise max_length, or leave their columns out."
                )
            cut = Completions(prompt[-room:] if prompt else [], [side[-limit:] for side in sides], whole.references)
        lost = len(prompt) - len(cut.prompt) + sum(map(len, sides)) - sum(map(len, cut.sides))
        return cut._replace(cut=lost)


class PreferenceRows(CompletionRows):
    """`prepare_preferences`'s rows."""

    kind = "preferences"
    features = {
        "prompt_ids": IDS,
        "chosen_ids": IDS,
        "rejected_ids": IDS,
        "margin": datasets.Value("float32"),
        "chosen_reference_logps": LOGPS,
        "rejected_reference_logps": LOGPS,
    }
    optional = ("margin", "chosen_reference_logps", "rejected_reference_logps")

    def parse(self, row: Mapping[str, Any]) -> Given:
        """The two sides of a row."""
        return parse_pair(row, self.roles)

    def made(self, given: Given, whole: Completions, notes: set[str]) -> list[Row]:
        """One row."""
        fitted = self.fit(whole)
        columns: dict[str, Any] = {"margin": given.margin}
        for name, values in (("ids", fitted.sides), ("reference_logps", fitted.references)):
            columns.update(zip(_columns(fitted.sides, name), values, strict=True))
        return [fitted.row(columns, notes)]


class FeedbackRows(CompletionRows):
    """`prepare_feedback`'s rows."""

    kind = "feedback"
    features = {
        "prompt_ids": IDS,
        "completion_ids": IDS,
        "label": datasets.Value("bool"),
        "reference_logps": LOGPS,
    }
    optional = ("reference_logps",)

    def parse(self, row: Mapping[str, Any]) -> Given:
        """The completion of a row, or the two sides of a pair."""
        return parse_feedback(row, self.roles)

    def made(self, given: Given, whole: Completions, notes: set[str]) -> list[Row]:
        """One row for each completion."""
        rows = []
        for side, logps, label in zip(whole.sides, whole.references, given.labels, strict=True):
            fitted = self.fit(Completions(whole.prompt, [side], [logps]))
            columns = {"completion_ids": fitted.sides[0], "label": label, "reference_logps": fitted.references[0]}
            rows.append(fitted.row(columns, notes))
        return rows


def _prompt_end(conversation: Conversation, count: int) -> int:
    """Where the first `count` messages, rendered for a sampler, end in the whole rendering."""
    if not count:
        return 0
    messages = conversation.messages[:count]
    opened = conversation.messages[count]["role"] == "assistant"
    prompt = conversation.renderer.text(messages, conversation.tools, conversation.kwargs, opened)
    if conversation.text.startswith(prompt):
        return len(prompt)
    same = len(os.path.commonprefix([prompt, conversation.text]))
    raise DataError(
        f"the prompt that a sampler gets is not what the conversation begins with: after {prompt[:same][-30:]!r} the "
        f"chat template writes {prompt[same:][:30]!r} for the prompt, and {conversation.text[same:][:30]!r} for the "
        "conversation. Give the row what the template leaves out or adds (such as the reasoning of the answer), set "
        "chat_template_kwargs, or change the template."
    )


def _first(mask: Sequence[bool]) -> int:
    return mask.index(True) if True in mask else len(mask)


def _last(mask: Sequence[bool]) -> int:
    return len(mask) - list(reversed(mask)).index(True) if True in mask else len(mask)


def _columns(sides: Sequence[Any], what: str) -> list[str]:
    if len(sides) == len(SIDES):
        return [f"{side}_{what}" for side in SIDES]
    return ["completion_ids" if what == "ids" else what]


def _check_references(whole: Completions, prompted: bool) -> None:
    for column, side, logps in zip(
        _columns(whole.sides, "reference_logps"), whole.sides, whole.references, strict=True
    ):
        if logps is None:
            continue
        if not prompted:
            raise DataError(f"column {column!r} needs 'prompt_ids' beside it, which say where the completion begins.")
        if len(logps) != len(side):
            raise DataError(f"column {column!r} has {len(logps)} entries, the completion has {len(side)} tokens.")


def _notes(pieces: Sequence[Piece], whole: Completions) -> set[str]:
    notes = set()
    if any(piece.straddles for piece in pieces):
        notes.add("a token holds the end of the prompt and the start of the completion: it is the completion's")
    if len(whole.sides) > 1 and whole.sides[0] == whole.sides[1]:
        notes.add("chosen and rejected are the same")
    if len(whole.sides) > 1 and not whole.prompt:
        notes.add("chosen and rejected begin differently and have no prompt: they are compared as a whole")
    return notes

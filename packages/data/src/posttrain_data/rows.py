"""One batch of raw rows to token ids: what every preparation shares, for lists, map data sets, workers and streams."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from posttrain_data.errors import DataError
from posttrain_data.formats import Chat, strip_none
from posttrain_data.keys import KeyWatch
from posttrain_data.options import DataOptions
from posttrain_data.packing import Packing
from posttrain_data.rendering import Encoded, Renderer

RAW = "posttrain_raw_row"  # column that holds a whole row as JSON, exactly as it was


class Row(NamedTuple):
    """A prepared row and what was done to it; `dropped` names the reason when it is not kept.

    `columns` hold the row, `tokens` and `targets` count what is in them, `cut` what was cut away. The last three are
    for the report: message keys that the template was not seen to read, those it was, and sentences.
    """

    columns: dict[str, Any]
    dropped: str | None = None
    tokens: int = 0
    targets: int = 0
    cut: int = 0
    unread: set[str] = set()
    read: set[str] = set()
    notes: set[str] = set()


class Draft(NamedTuple):
    """A text before tokenisation, the characters that are targets (None: all), and how it is closed."""

    text: str
    spans: list[tuple[int, int]] | None
    add_special: bool
    append_eos: bool
    unread: set[str] = set()
    read: set[str] = set()
    notes: set[str] = set()


class Work(NamedTuple):
    """A raw row on its way: the texts to tokenise, and whatever else its maker has to remember."""

    drafts: list[Draft]
    rest: Any = None


class Piece(NamedTuple):
    """A tokenised draft: ids, which of them are targets, and whether its first target also holds what comes before."""

    ids: list[int]
    mask: list[bool]
    straddles: bool


class RowMaker(ABC):
    """Turns raw rows into `Row`s. Errors name the data set and the row.

    Args:
        tokenizer: Tokenizer or processor.
        options: What shapes the rows; see `DataOptions`.
        name: Name of the data set in messages.
    """

    kind: ClassVar[str]
    """Begins the names of folders in the cache."""
    features: ClassVar[dict[str, Any]]
    """Columns of a prepared row."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Those of them that all rows have or none."""
    lacking: ClassVar[str]
    """What an unusable row has none of, in messages."""
    question: ClassVar[str]
    """What may be wrong when no row is usable."""
    packing: Packing | None = None

    def __init__(self, tokenizer: Any, options: DataOptions, name: str) -> None:
        self.renderer = Renderer(tokenizer)
        self.tokenizer = self.renderer.tokenizer
        self.source = tokenizer
        self.options = options
        self.name = name
        self.exact: frozenset[str] = frozenset()
        """Columns that come as JSON text, whose None values are the author's own and not Arrow's."""
        self.roles = self.renderer.roles()
        self.watch = KeyWatch(self.renderer)
        self.vocabulary = max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def __call__(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[list[Row]]:
        """For each raw row what it became, in the same order."""
        works = [self._at(index, self._work, row) for row, index in zip(rows, indices, strict=True)]
        encoded = iter(self._encode([draft for work in works for draft in work.drafts]))
        made = []
        for work, index in zip(works, indices, strict=True):
            made.append(self._at(index, self._made, work, [next(encoded) for _ in work.drafts]))
        return made

    def _at(self, index: int, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except DataError as error:
            raise DataError(f"{self.name}: row {index}: {error}") from None

    def _work(self, row: Mapping[str, Any]) -> Work:
        work = self.work(self._given(row))
        for draft in work.drafts:
            try:
                draft.text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"half of a surrogate pair ({draft.text[error.start]!r}), which is no character: remove it."
                ) from None
        return work

    def _made(self, work: Work, encoded: Sequence[Encoded]) -> list[Row]:
        pieces = [self._piece(draft, tokens) for draft, tokens in zip(work.drafts, encoded, strict=True)]
        about = [set().union(*(draft[at] for draft in work.drafts)) for at in (-3, -2, -1)]
        return [
            row._replace(unread=about[0], read=about[1], notes=about[2] | row.notes) for row in self.rows(work, pieces)
        ]

    @abstractmethod
    def work(self, row: Mapping[str, Any]) -> Work:
        """Recognises a row, and renders what has to be rendered."""

    @abstractmethod
    def rows(self, work: Work, pieces: Sequence[Piece]) -> list[Row]:
        """Puts the tokenised drafts of a row together."""

    @abstractmethod
    def spans(self, chat: Chat, kwargs: Mapping[str, Any], text: str) -> list[tuple[int, int]] | None:
        """The characters of a rendered conversation that are targets; None for all."""

    # Text and spans

    def _given(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row as its author wrote it."""
        if row.get(RAW) is not None:
            return json.loads(row[RAW])
        return {
            key: _loads(value, key) if key in self.exact else strip_none(value)
            for key, value in row.items()
            if key != RAW
        }

    def text_draft(self, text: str, spans: list[tuple[int, int]] | None) -> Draft:
        """Plain text, which the end-of-sequence token closes."""
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token, which closes a text: set its eos_token.")
        bos = self.tokenizer.bos_token
        return Draft(text, spans, not (bos and text.startswith(bos)), True)

    def chat_draft(self, chat: Chat) -> Draft:
        """A conversation, rendered; its end-of-turn token closes it, or else the end-of-sequence token."""
        kwargs = {**(self.options.chat_template_kwargs or {}), **chat.kwargs}
        try:
            text = self.renderer.text(chat.messages, chat.tools, kwargs)
        except DataError as error:
            raise DataError(f"{error}{_repeated_role(chat)}") from None
        unread, read = self.watch.look(chat.messages, chat.tools, kwargs, text)
        open_ended = chat.messages[-1]["role"] == "assistant" and not self._closed(text)
        spans = self.spans(chat, kwargs, text)
        notes = self._notes(chat)
        if open_ended:
            notes.add("the chat template writes no end-of-turn token: eos_token is appended to conversations")
            if self.tokenizer.eos_token_id is None:
                raise DataError(
                    "neither the chat template nor the tokenizer has a token that ends a turn: set tokenizer.eos_token."
                )
        return Draft(text, spans, False, open_ended, unread, read, notes)

    def _closed(self, text: str) -> bool:
        text = text.rstrip()
        last = None
        for match in self.renderer.special_pattern.finditer(text, max(0, len(text) - 200)):
            last = match
        return last is not None and last.end() == len(text)

    def _notes(self, chat: Chat) -> set[str]:
        facts = self.renderer.facts(chat.tools)
        notes = set()
        if chat.tools and "tools" not in facts.variables:
            notes.add("the chat template does not show tools: rows have them, the model will not see them")
        calls = any("tool_calls" in message for message in chat.messages)
        if calls and "tool_calls" not in facts.strings and not facts.dumps:
            notes.add("the chat template has no tool calls: they are written as JSON in the content")
        return notes

    # Tokens and masks

    def check_ids(self, ids: Sequence[int], column: str) -> None:
        """Refuses token ids that the tokenizer does not have."""
        if ids and max(ids) >= self.vocabulary:
            raise DataError(
                f"column {column!r} holds {max(ids)}, the tokenizer's ids end at {self.vocabulary - 1}: tokenise "
                "the rows with this tokenizer."
            )

    def _encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        encoded: dict[int, Encoded] = {}
        for special in (False, True):
            places = [n for n, draft in enumerate(drafts) if draft.add_special is special]
            texts = [drafts[place].text for place in places]
            encoded.update(zip(places, self.renderer.encode_batch(texts, special), strict=True))
        return [encoded[place] for place in range(len(drafts))]

    def _piece(self, draft: Draft, encoded: Encoded) -> Piece:
        ids = list(encoded.ids)
        mask = self._mask(draft, encoded)
        straddles = False
        if draft.spans and encoded.offsets and True in mask:
            straddles = encoded.offsets[mask.index(True)][0] < draft.spans[0][0]
        eos = self.tokenizer.eos_token_id
        if draft.append_eos and ids and ids[-1] != eos:
            ids.append(eos)
            mask.append(draft.spans is None or any(stop >= len(draft.text) for _, stop in draft.spans))
        elif draft.append_eos and ids and draft.spans is not None:
            mask[-1] = True  # written by the tokenizer behind the text, or by the text itself
        return Piece(ids, mask, straddles)

    def _mask(self, draft: Draft, encoded: Encoded) -> list[bool]:
        if draft.spans is None:
            return [True] * len(encoded.ids)
        if encoded.offsets is None:
            return self._prefix_mask(draft, encoded.ids)
        return offset_mask(encoded.offsets, draft.spans)

    def _prefix_mask(self, draft: Draft, ids: list[int]) -> list[bool]:
        """For tokenizers without offsets: where the tokens of a prefix of the text stop agreeing with the whole."""
        assert draft.spans is not None
        mask = [False] * len(ids)
        for start, stop in draft.spans:
            first = self._agreement(draft, ids, start, straddling=False)
            last = self._agreement(draft, ids, stop, straddling=True)
            mask[first:last] = [True] * (last - first)
        return mask

    def _agreement(self, draft: Draft, ids: list[int], at: int, straddling: bool) -> int:
        if at >= len(draft.text) and straddling:
            return len(ids)
        part = self.renderer.encode_batch([draft.text[:at]], draft.add_special)[0].ids if at else []
        eos = self.tokenizer.eos_token_id
        if part and draft.add_special and part[-1] == eos and not draft.text[:at].endswith(self.tokenizer.eos_token):
            part = part[:-1]
        shared = 0
        for a, b in zip(part, ids, strict=False):
            if a != b:
                break
            shared += 1
        return shared + (straddling and shared < len(part))


def offset_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """True for tokens of which any character lies in a span; spans ascend and do not overlap.

    A token across the border between prompt and completion is a target: the sampler is given the prompt's own tokens
    and must produce the rest, so leaving it out would leave generated characters untrained.
    """
    mask = [False] * len(offsets)
    starts = [start for start, _ in offsets]
    stops = [stop for _, stop in offsets]
    for start, stop in spans:
        first, last = bisect_right(stops, start), bisect_left(starts, stop)
        mask[first:last] = [True] * (last - first)
    return mask


def _loads(text: Any, column: str) -> Any:
    try:
        value = json.loads(text) if isinstance(text, str) else text
        if isinstance(value, str) and value[:1] in ("[", "{") and re.search(r"\d{19}", value):
            value = json.loads(value)  # datasets encodes JSON text again where its own parser finds an integer too big
        return value
    except json.JSONDecodeError as error:
        raise DataError(f"column {column!r} holds text that is not JSON: {error}.") from None


def _repeated_role(chat: Chat) -> str:
    for index in range(1, len(chat.messages)):
        before, here = chat.messages[index - 1]["role"], chat.messages[index]["role"]
        if before == here:
            return (
                f" (messages[{index - 1}] and messages[{index}] are both {here!r}: "
                "join them into one, or put the other side's turn between them)"
            )
    return f" (roles: {', '.join(message['role'] for message in chat.messages)})"

"""One batch of raw rows to token ids and targets: the same code for lists, map data sets, workers and streams."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain_data.errors import DataError
from posttrain_data.formats import Chat, Text, Tokens, parse_row, strip_none
from posttrain_data.keys import KeyWatch
from posttrain_data.options import ALL_CUT, EMPTY, NO_TARGET, SFTDataOptions
from posttrain_data.rendering import Encoded, Renderer
from posttrain_data.spans import Conversation, turn_spans

RAW = "posttrain_raw_row"  # column that holds a whole row as JSON, exactly as it was


class Row(NamedTuple):
    """A tokenised row and what was done to it; `dropped` names the reason when it is not kept."""

    input_ids: list[int]
    loss_mask: list[bool]
    seq_lengths: list[int] | None
    dropped: str | None
    cut: int
    unread: set[str]
    read: set[str]
    notes: set[str]


class Draft(NamedTuple):
    """A row before tokenisation: text, the characters that are targets (None: all), and how it is closed."""

    text: str
    spans: list[tuple[int, int]] | None
    add_special: bool
    append_eos: bool
    unread: set[str] = set()
    read: set[str] = set()
    notes: set[str] = set()


class RowMaker:
    """Turns rows into `Row`s. Errors name the data set and the row.

    Args:
        tokenizer: Tokenizer or processor.
        options: See `SFTDataOptions`.
        name: Name of the data set in messages.
        exact: Columns that come as JSON text, whose None values are the author's own and not Arrow's.
        cut: Whether rows are cut to `max_length` here (packing that splits or wraps cuts later).
    """

    def __init__(self, tokenizer: Any, options: SFTDataOptions, name: str, exact: frozenset[str], cut: bool) -> None:
        self.renderer = Renderer(tokenizer)
        self.tokenizer = self.renderer.tokenizer
        self.options = options
        self.name = name
        self.exact = exact
        self.cut = cut
        self.roles = self.renderer.roles()
        self.watch = KeyWatch(self.renderer)
        self.vocabulary = max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def __call__(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[Row]:
        """Rows in the same order, one for one."""
        drafts: list[Draft | Tokens] = []
        for row, index in zip(rows, indices, strict=True):
            try:
                drafts.append(self._draft(row))
            except DataError as error:
                raise DataError(f"{self.name}: row {index}: {error}") from None
        encoded = self._encode(drafts)
        made = []
        for draft, tokens, index in zip(drafts, encoded, indices, strict=True):
            try:
                made.append(self._finish(draft, tokens))
            except DataError as error:
                raise DataError(f"{self.name}: row {index}: {error}") from None
        return made

    # Text and spans

    def _draft(self, row: Mapping[str, Any]) -> Draft | Tokens:
        row = self._given(row)
        formatted = self.options.formatting_func is not None and "input_ids" not in row
        parsed = self._formatted(row) if formatted else parse_row(row, self.options.text_field, self.roles)
        if isinstance(parsed, Tokens):
            masked = any(row.get(column) is not None for column in ("assistant_masks", "loss_mask", "labels"))
            if self.options.assistant_only and not masked:
                raise DataError("assistant_only=True needs a conversation, or 'assistant_masks' beside 'input_ids'.")
            return parsed
        draft = self._text(parsed) if isinstance(parsed, Text) else self._chat(parsed)
        try:
            draft.text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"half of a surrogate pair ({draft.text[error.start]!r}), which is no character: remove it."
            ) from None
        return draft

    def _given(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row as its author wrote it."""
        if row.get(RAW) is not None:
            return json.loads(row[RAW])
        return {
            key: _loads(value, key) if key in self.exact else strip_none(value)
            for key, value in row.items()
            if key != RAW
        }

    def _formatted(self, row: Mapping[str, Any]) -> Text | Chat:
        assert self.options.formatting_func is not None
        made = self.options.formatting_func(dict(row))
        if isinstance(made, str):
            return Text(None, made)
        if isinstance(made, list) and made and isinstance(made[0], Mapping):
            parsed = parse_row({**row, "messages": made}, self.options.text_field, self.roles)
            if isinstance(parsed, Chat):
                return parsed
        raise DataError(f"formatting_func returned {made!r:.60} ({type(made).__name__}): return a string or messages.")

    def _text(self, text: Text) -> Draft:
        if self.options.assistant_only:
            raise DataError("assistant_only=True needs a conversation, this row is plain text: set it to False.")
        spans = None
        if text.prompt is None:
            if self.options.completion_only:
                raise DataError("completion_only=True needs columns 'prompt' and 'completion'.")
        elif self.options.completion_only is not False:
            spans = [(len(text.prompt), len(text.text))]
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token, which closes a text: set its eos_token.")
        bos = self.tokenizer.bos_token
        return Draft(text.text, spans, not (bos and text.text.startswith(bos)), True)

    def _chat(self, chat: Chat) -> Draft:
        kwargs = {**(self.options.chat_template_kwargs or {}), **chat.kwargs}
        try:
            text = self.renderer.text(chat.messages, chat.tools, kwargs)
        except DataError as error:
            raise DataError(f"{error}{_repeated_role(chat)}") from None
        unread, read = self.watch.look(chat.messages, chat.tools, kwargs, text)
        open_ended = chat.messages[-1]["role"] == "assistant" and not self._closed(text)
        spans = self._spans(chat, kwargs, text)
        notes = self._notes(chat)
        if open_ended:
            notes.add("the chat template writes no end-of-turn token: eos_token is appended to conversations")
            if self.tokenizer.eos_token_id is None:
                raise DataError(
                    "neither the chat template nor the tokenizer has a token that ends a turn: set eos_token."
                )
        return Draft(text, spans, False, open_ended, unread, read, notes)

    def _closed(self, text: str) -> bool:
        text = text.rstrip()
        last = None
        for match in self.renderer.special_pattern.finditer(text, max(0, len(text) - 200)):
            last = match
        return last is not None and last.end() == len(text)

    def _spans(self, chat: Chat, kwargs: Mapping[str, Any], text: str) -> list[tuple[int, int]] | None:
        options = self.options
        if options.completion_only and chat.prompt_length is None:
            raise DataError("completion_only=True needs columns 'prompt' and 'completion'; see also assistant_only.")
        completion = chat.prompt_length is not None and options.completion_only is not False
        if not (completion or options.assistant_only):
            if options.train_on == "last":
                raise DataError("train_on='last' picks among assistant turns: write assistant_only=True with it.")
            return None
        first = (chat.prompt_length or 0) if completion else 0
        wanted = [n for n, message in enumerate(chat.messages) if n >= first and message["role"] == "assistant"]
        if options.train_on == "last":
            wanted = wanted[-1:]
        conversation = Conversation(self.renderer, chat.messages, chat.tools, kwargs, text)
        return [(span.start, span.stop) for span in turn_spans(conversation, wanted)]

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

    def _encode(self, drafts: Sequence[Draft | Tokens]) -> list[Encoded | None]:
        encoded: list[Encoded | None] = [None] * len(drafts)
        for special in (False, True):
            places = [(n, d) for n, d in enumerate(drafts) if isinstance(d, Draft) and d.add_special is special]
            texts = [draft.text for _, draft in places]
            for (place, _), tokens in zip(places, self.renderer.encode_batch(texts, special), strict=True):
                encoded[place] = tokens
        return encoded

    def _finish(self, draft: Draft | Tokens, encoded: Encoded | None) -> Row:
        if isinstance(draft, Tokens):
            ids, mask, lengths = list(draft.input_ids), list(draft.loss_mask), draft.seq_lengths
            if ids and max(ids) >= self.vocabulary:
                raise DataError(
                    f"column 'input_ids' holds {max(ids)}, the tokenizer's ids end at {self.vocabulary - 1}: tokenise "
                    "the rows with this tokenizer."
                )
            at = 0
            for length in lengths if lengths is not None else [len(ids)]:
                if length:
                    mask[at] = False
                at += length
            return self._fit(ids, mask, lengths, Draft("", None, False, False))
        assert encoded is not None
        ids = list(encoded.ids)
        mask = self._mask(draft, encoded)
        eos = self.tokenizer.eos_token_id
        if draft.append_eos and ids and ids[-1] != eos:
            ids.append(eos)
            mask.append(draft.spans is None or any(stop >= len(draft.text) for _, stop in draft.spans))
        elif draft.append_eos and ids and draft.spans is not None:
            mask[-1] = True  # written by the tokenizer behind the text, or by the text itself
        if mask:
            mask[0] = False
        return self._fit(ids, mask, None, draft)

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

    def _fit(self, ids: list[int], mask: list[bool], lengths: list[int] | None, draft: Draft) -> Row:
        about = (draft.unread, draft.read, draft.notes)
        limit = self.options.max_length
        if not ids:
            return Row([], [], None, EMPTY, 0, *about)
        if not any(mask):
            return Row([], [], None, NO_TARGET, 0, *about)
        cut = 0
        if lengths is None and self.cut and limit is not None and len(ids) > limit:
            cut = len(ids) - limit
            keep = slice(0, limit) if self.options.truncation_mode == "keep_start" else slice(cut, None)
            ids, mask = ids[keep], mask[keep]
            mask[0] = False
            if not any(mask):
                return Row([], [], None, ALL_CUT, 0, *about)
        return Row(ids, mask, lengths, None, cut, *about)


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

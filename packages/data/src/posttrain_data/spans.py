"""Which characters of a rendered conversation its assistant turns generated, for any chat template.

Let R be the whole rendering and M its messages. Turn i was generated from what a sampler is given at that point,
`P = render(M[:i], add_generation_prompt=True)`, so it starts where R leaves P; and it ends with the special tokens
that close it. Where P is no prefix of R (system text or tools that move, thinking that is shown in one and not in the
other), both are rendered once more with a marker word in place of the last shared content and compared from the marker
on. The template itself is the only source: no template is known by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain_data.errors import DataError
from posttrain_data.formats import REASONING, Message
from posttrain_data.rendering import PROBE, Renderer


class TurnError(DataError):
    """An assistant turn that is not to be found in its rendering: why, and what masks of turns may do instead."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason} {advice}")
        self.reason = reason


class Span(NamedTuple):
    """Characters `[start, stop)` of one assistant turn; from `closing` on they are its end-of-turn tokens."""

    start: int
    closing: int
    stop: int


class Conversation(NamedTuple):
    """A conversation with its rendering."""

    renderer: Renderer
    messages: Sequence[Message]
    tools: Any
    kwargs: Mapping[str, Any]
    text: str

    def prefix(self, count: int, prompt: bool) -> str | None:
        """The first `count` messages alone; None where the template refuses them."""
        return self.renderer.try_text(self.messages[:count], self.tools, self.kwargs, prompt)

    def after_probe(self, messages: Sequence[Message], prompt: bool) -> str | None:
        """What a rendering holds after the marker word; None where it is refused or does not show the word."""
        text = self.renderer.try_text(messages, self.tools, self.kwargs, prompt)
        if text is None or PROBE not in text:
            return None
        return text.rpartition(PROBE)[2]

    def replaced(self, index: int, count: int | None = None) -> list[Message]:
        """The first `count` messages with the content of message `index` replaced by the marker word."""
        messages = list(self.messages[:count])
        messages[index] = {**messages[index], "content": PROBE}
        return messages


def turn_spans(conversation: Conversation, wanted: Sequence[int], start: int | None = None) -> list[Span]:
    """The spans of the assistant messages `wanted`, narrowed by the template's own generation markers if it has any.

    Where the first of them starts need not be found when it is given as `start`.

    Raises:
        DataError: When a turn cannot be found in the rendering, because the template rewrites or hides part of it.
    """
    known = [] if start is None else [start]
    starts = known + [_start(conversation, index) for index in wanted[len(known) :]]
    ending = _ending(conversation, starts[-1]) if wanted and wanted[-1] == len(conversation.messages) - 1 else ""
    spans = []
    for index, start in zip(wanted, starts, strict=True):
        limit = _plain_limit(conversation, index, start, ending)
        if limit is None:
            limit = _limit(conversation, index, start)
        spans.append(_close(conversation, index, start, limit))
    if conversation.renderer.facts(conversation.tools).marked:
        return _narrow(conversation, spans)
    return spans


def _narrow(conversation: Conversation, spans: list[Span]) -> list[Span]:
    """The author's markers decide what of a turn is trained; its end-of-turn tokens stay with it."""
    marks = conversation.renderer.marks(conversation.messages, conversation.tools, conversation.kwargs)
    narrowed = []
    for span in spans:
        inside = [(max(a, span.start), min(b, span.stop)) for a, b in marks if a < span.stop and b >= span.start]
        if not inside:
            continue
        narrowed += [Span(a, b, b) for a, b in inside if a < b]
        last = max(b for _, b in inside)
        if last < span.stop:
            narrowed.append(Span(max(last, span.closing), span.closing, span.stop))
    return narrowed or spans


# Where a turn starts


def _start(conversation: Conversation, index: int) -> int:
    text = conversation.text
    prompt = conversation.prefix(index, prompt=True)
    if prompt is not None and text.startswith(prompt):
        return len(prompt)
    if index == 0:
        return _first_start(conversation)
    ours = conversation.after_probe(conversation.replaced(index - 1), prompt=False)
    if ours is not None and text.endswith(ours):
        role = conversation.messages[index - 1]["role"]
        again = [message for message in conversation.replaced(index - 1, index) if message["role"] != "system"]
        alternatives = (conversation.replaced(index - 1, index), _short(role), [*conversation.messages, *again])
        for messages in alternatives:
            theirs = conversation.after_probe(messages, prompt=True)
            if theirs is not None:
                return len(text) - len(ours) + _shared(conversation.renderer, ours, theirs)
    raise TurnError(
        f"messages[{index}]: the start of this assistant turn cannot be found, because the chat template rewrites what "
        "comes before it.",
        "Train on all tokens (assistant_only=False), or change the template.",
    )


def _first_start(conversation: Conversation) -> int:
    """A conversation that opens with the assistant: what the generation prompt writes, found before the content."""
    ours = conversation.renderer.try_text(conversation.replaced(0), conversation.tools, conversation.kwargs, False)
    if ours is None or PROBE not in ours:
        raise DataError("messages[0]: the chat template does not show the content of this assistant turn.")
    return len(os.path.commonprefix([conversation.text, ours.partition(PROBE)[0]]))


def _short(role: str) -> list[Message]:
    probe: Message = {"role": role, "content": PROBE}
    return [probe] if role in ("user", "system") else [{"role": "user", "content": "?"}, probe]


def _shared(renderer: Renderer, ours: str, theirs: str) -> int:
    """Length of the common start of two texts, cut back to a special token or a space where it ends inside a word."""
    shared = os.path.commonprefix([ours, theirs])
    if shared == theirs:
        return len(shared)
    ends = [0] + [match.end() for match in re.finditer(r"\s", shared)]
    ends += [match.end() for match in renderer.special_pattern.finditer(ours) if match.end() <= len(shared)]
    return max(ends)


# Where a turn ends


def _ending(conversation: Conversation, start: int) -> str:
    """What follows the content of the last turn, where that is shown as it is; empty where it is not."""
    content = conversation.messages[-1].get("content")
    if not isinstance(content, str) or not conversation.text.startswith(content, start):
        return ""
    ending = conversation.text[start + len(content) :]
    return ending if conversation.renderer.special_pattern.match(ending) else ""


def _plain_limit(conversation: Conversation, index: int, start: int, ending: str) -> int | None:
    """The end of a turn that shows its content as it is, followed by just what follows the last turn's."""
    content = conversation.messages[index].get("content")
    if ending and isinstance(content, str):
        after = start + len(content)
        if conversation.text.startswith(content, start) and conversation.text.startswith(ending, after):
            return after + len(ending)
    return None


def _limit(conversation: Conversation, index: int, start: int) -> int:
    """Where the next message begins (the end of the text for the last one)."""
    text = conversation.text
    if index == len(conversation.messages) - 1:
        return len(text)
    alone = conversation.prefix(index + 1, prompt=False)
    if alone is not None and len(alone) > start and text.startswith(alone):
        return len(alone)
    pattern = conversation.renderer.special_pattern
    best: int | None = None
    for probed in _end_probes(conversation, index):
        ours = conversation.after_probe(probed, prompt=False)
        if ours is None or not text.endswith(ours) or len(text) - len(ours) < start:
            continue
        for theirs in _closings(conversation, index, probed):
            shared = _common_segments(pattern, ours, theirs)
            limit = len(text) - len(ours) + shared
            if pattern.search(ours[:shared]):
                return limit
            best = limit if best is None else max(best, limit)
    if best is not None:
        return best
    raise TurnError(
        f"messages[{index}]: the end of this assistant turn cannot be found in the rendered conversation, because the "
        "chat template rewrites or hides it.",
        "Train on the last turn (train_on='last') or on all tokens.",
    )


def _end_probes(conversation: Conversation, index: int) -> list[list[Message]]:
    probes = [conversation.replaced(index)]
    message = conversation.messages[index]
    if message.get("tool_calls"):
        *calls, last = message["tool_calls"]
        last = {**last, "function": {**last["function"], "name": PROBE}}
        renamed = list(conversation.messages)
        renamed[index] = {**message, "tool_calls": [*calls, last]}
        probes.insert(0, renamed)
    return probes


def _closings(conversation: Conversation, index: int, probed: list[Message]) -> list[str]:
    """What may follow an assistant turn: as the last one, before a generation prompt, in the shortest conversation."""
    found = [conversation.after_probe(probed[: index + 1], prompt=False)]
    prompted = conversation.after_probe(probed[: index + 1], prompt=True)
    opening = generation_prompt(conversation.renderer, conversation.tools, conversation.kwargs)
    if prompted is not None and opening and prompted.endswith(opening):
        found.append(prompted.removesuffix(opening))
    if conversation.messages[-1]["role"] == "assistant":
        last = conversation.replaced(len(conversation.messages) - 1)
        found.append(conversation.after_probe(last, prompt=False))
    else:
        answered = [*conversation.messages, {"role": "assistant", "content": PROBE}]
        found.append(conversation.after_probe(answered, prompt=False))
    short = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    found.append(conversation.after_probe(short, prompt=False))
    return [closing for closing in found if closing is not None]


def generation_prompt(renderer: Renderer, tools: Any, kwargs: Mapping[str, Any]) -> str:
    """What opens an assistant turn after a user's; empty where the template has no such thing."""
    user: list[Message] = [{"role": "user", "content": "?"}]
    plain = renderer.try_text(user, tools, kwargs, False)
    prompted = renderer.try_text(user, tools, kwargs, True)
    if plain is None or prompted is None or not prompted.startswith(plain):
        return ""
    return prompted[len(plain) :]


def _segments(pattern: re.Pattern[str], text: str) -> list[str]:
    parts, at = [], 0
    for match in pattern.finditer(text):
        parts += [text[at : match.start()], match.group()]
        at = match.end()
    return [part for part in [*parts, text[at:]] if part]


def _common_segments(pattern: re.Pattern[str], ours: str, theirs: str) -> int:
    """Length of the common start of two texts in whole special tokens and the plain text between them."""
    length = 0
    for a, b in zip(_segments(pattern, ours), _segments(pattern, theirs), strict=False):
        if a != b:
            return length + (0 if pattern.fullmatch(a) or pattern.fullmatch(b) else len(os.path.commonprefix([a, b])))
        length += len(a)
    return length


# What lies between


def _close(conversation: Conversation, index: int, start: int, limit: int) -> Span:
    content_end = _content_end(conversation, index, start, limit)
    closing = stop = None
    for match in conversation.renderer.special_pattern.finditer(conversation.text, content_end, limit):
        between = conversation.text[stop or content_end : match.start()]
        if closing is None or between.strip():
            closing = match.start()
        stop = match.end()
    if closing is None or stop is None:
        return Span(start, limit, limit)
    return Span(start, closing, stop)


def _content_end(conversation: Conversation, index: int, start: int, limit: int) -> int:
    """Where the last visible piece of a message ends within its turn; refuses a turn that misses one."""
    end = start
    pattern = conversation.renderer.special_pattern
    for what, piece in _pieces(conversation.messages[index]):
        found = _find_end(pattern, conversation.text[start:limit], piece)
        if found is None:  # what the row writes out may be what the generation prompt writes, such as "<think>"
            opening = len(generation_prompt(conversation.renderer, conversation.tools, conversation.kwargs))
            found = _find_end(pattern, conversation.text[max(0, start - opening) : limit], piece)
            found = None if found is None else found - min(start, opening)
        if found is None:
            raise TurnError(
                f"messages[{index}]: the chat template hides or rewrites {what} of this assistant turn "
                f"({piece.strip()[:60]!r}), so what it would train is not what the row says.",
                "Train on the last turn (train_on='last') or on all tokens, or remove that part from the row.",
            )
        end = max(end, start + found)
    return end


def _find_end(pattern: re.Pattern[str], region: str, piece: str) -> int | None:
    """Where a piece ends in a region, its own spaces aside; None when it is not there."""
    if region.startswith(piece):
        return len(piece)
    wanted = piece.strip()
    last = max((match.start() for match in pattern.finditer(region)), default=0)
    for part in (region[:last], region):  # a piece such as "<" is also found in the token that ends the turn
        at = part.rfind(wanted)
        if at >= 0:
            return at + len(wanted)
    squeezed = re.sub(r"\s+", "", wanted)
    return _unsqueezed_end(region, squeezed) if squeezed in re.sub(r"\s+", "", region) else None


def _unsqueezed_end(region: str, squeezed: str) -> int:
    places = [at for at, character in enumerate(region) if not character.isspace()]
    plain = "".join(region[at] for at in places)
    return places[plain.rfind(squeezed) + len(squeezed) - 1] + 1


def _pieces(message: Message) -> list[tuple[str, str]]:
    pieces = [(f"the {key!r}", message[key]) for key in REASONING if isinstance(message.get(key), str)]
    content = message.get("content") or ""
    if isinstance(content, str):
        pieces.append(("the content", content))
    else:
        pieces += [("the content", part["text"]) for part in content]
    pieces += [("the tool call", call["function"]["name"]) for call in message.get("tool_calls", [])]
    return [(what, piece) for what, piece in pieces if piece.strip()]

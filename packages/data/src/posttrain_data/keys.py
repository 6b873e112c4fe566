"""Message keys that a chat template never reads: typing errors, and data that would silently be left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain_data.errors import DataError, nearest
from posttrain_data.formats import REASONING, Message
from posttrain_data.rendering import Renderer

METADATA = ("tool.name", "tool.tool_call_id")  # links a result to its call; most templates go by the order
TRIES = 8  # rows in which a key is changed and rendered again before it counts as unread


class KeyWatch:
    """Finds keys that no rendering depends on.

    A key that the template's source does not contain is unread at once. Any other key is changed in a copy of the row
    that has it, and is read when the rendering changes; that is asked until the first yes, at most `TRIES` times.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.read: set[str] = set()
        self.tries: dict[str, int] = {}

    def look(
        self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any], text: str
    ) -> tuple[set[str], set[str]]:
        """Keys of this row as `role.key`: those not seen to be read, and those that this row showed to be read."""
        facts = self.renderer.facts(tools)
        unread: set[str] = set()
        fresh: set[str] = set()
        for index, message in enumerate(messages):
            for key in message:
                name = f"{message['role']}.{key}"
                if key == "role" or name in self.read or name in METADATA or not message[key]:
                    continue
                if key == "tool_calls" or (key in REASONING and facts.strings & set(REASONING)):
                    continue
                if key in facts.strings or facts.dumps or facts.walks:
                    tried = self.tries[name] = self.tries.get(name, 0) + 1
                    if tried <= TRIES and self._changes(messages, index, key, tools, kwargs, text):
                        self.read.add(name)
                        fresh.add(name)
                        continue
                unread.add(name)
        return unread, fresh

    def _changes(
        self, messages: Sequence[Message], index: int, key: str, tools: Any, kwargs: Mapping[str, Any], text: str
    ) -> bool:
        value = messages[index][key]
        other: Any = f"{value}~" if isinstance(value, str) else None
        if isinstance(value, list):
            other = [{"type": "text", "text": "~"}, *value]
        changed = list(messages)
        changed[index] = {**messages[index], key: other}
        if other is None:
            del changed[index][key]
        try:
            return self.renderer.text(changed, tools, kwargs) != text
        except DataError:
            return True


def describe_unread(unread: Mapping[str, int], renderer: Renderer) -> list[str]:
    """One line for each unread key, with the first row that has it and the nearest key that is read."""
    lines = []
    for name, row in sorted(unread.items(), key=lambda item: item[1]):
        role, key = name.split(".", 1)
        close = nearest(key, ["content", "tool_calls", *sorted(renderer.facts().strings)])
        hint = f"; did you mean {close!r}?" if close and close != key else ""
        lines.append(f"the chat template never reads key {key!r} of {role!r} messages (first in row {row}){hint}")
    return lines

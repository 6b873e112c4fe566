"""Rows in any of the known formats to one of three plain forms: text, chat, tokens.

Formats are recognised for each row from the columns that hold something, so rows of different formats can be mixed.
Errors here are `DataError`s without the row number, which the caller knows and adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain_data.errors import DataError, names, nearest

Message = dict[str, Any]

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
REASONING = ("reasoning_content", "thinking", "reasoning")
COLUMNS = (
    "text",
    "messages",
    "conversations",
    "prompt",
    "completion",
    "chosen",
    "instruction",
    "input",
    "output",
    "input_ids",
)
ACCEPTED = (
    "'text', 'messages', 'conversations', 'prompt' and 'completion', 'instruction' (and 'input') and 'output', "
    "or 'input_ids'"
)


class Text(NamedTuple):
    """Plain text; `prompt` is what comes before the completion, None when there is no such split."""

    prompt: str | None
    text: str


class Chat(NamedTuple):
    """A conversation. `prompt_length` messages come before the completion, None when there is no such split."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    prompt_length: int | None


class Tokens(NamedTuple):
    """Token ids made elsewhere, with the targets as given; `seq_lengths` when several sequences share the row."""

    input_ids: list[int]
    loss_mask: list[bool]
    seq_lengths: list[int] | None


def parse_row(
    row: Mapping[str, Any], text_field: str, extra_roles: frozenset[str] = frozenset()
) -> Text | Chat | Tokens:
    """Recognises the format of a row by the columns that are not None, and checks its types."""
    given = {key: value for key, value in row.items() if value is not None}
    if "input_ids" in given:
        return _tokens(given)
    if "chosen" in given:
        return parse_side(given, "chosen", extra_roles)
    if "messages" in given:
        return _chat(given, _messages(given["messages"], "messages", extra_roles), extra_roles)
    if "conversations" in given:
        return _chat(given, _messages(given["conversations"], "conversations", extra_roles), extra_roles)
    if "prompt" in given or "completion" in given:
        return _pair(given, extra_roles)
    if "instruction" in given:
        return _alpaca(given, extra_roles)
    if text_field in given:
        text = given[text_field]
        if not isinstance(text, str):
            raise DataError(f"column {text_field!r} holds {describe(text)}: write a string.")
        return Text(None, text)
    raise DataError(_unknown_format(row, text_field))


def strip_none(value: Any) -> Any:
    """Removes the keys whose value is None at every depth: Arrow adds them where other rows have the key."""
    if isinstance(value, Mapping):
        return {key: strip_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [strip_none(item) for item in value]
    return value


def _unknown_format(row: Mapping[str, Any], text_field: str) -> str:
    empty = [key for key in (*COLUMNS, text_field) if key in row]
    if empty:
        return f"column {empty[0]!r} is empty (None): write a value, or leave the row out."
    hints = [(key, nearest(key, (*COLUMNS, text_field))) for key in row]
    found = [f"{key!r} looks like {close!r}" for key, close in hints if close]
    hint = f" ({', '.join(found)})" if found else ""
    return (
        f"no known format: its columns are {names(row)}{hint}. Write {ACCEPTED}, or name the text column in text_field."
    )


def describe(value: Any) -> str:
    """A value and its type, for messages."""
    return f"{value!r:.60} ({type(value).__name__})"


def _maybe_json(value: Any, column: str, wanted: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(f"column {column!r} is a string that is not JSON ({error}): write {wanted}.") from None


# Conversations


def _chat(
    row: Mapping[str, Any], messages: list[Message], roles: frozenset[str], prompt_length: int | None = None
) -> Chat:
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
        prompt_length = None if prompt_length is None else prompt_length + 1
    kwargs = _maybe_json(row.get("chat_template_kwargs") or {}, "chat_template_kwargs", "a dict")
    if not isinstance(kwargs, Mapping):
        raise DataError(f"column 'chat_template_kwargs' holds {describe(kwargs)}: write a dict.")
    return Chat(messages, parse_tools(row.get("tools")), strip_none(kwargs), prompt_length)


def parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as a list of JSON schemas in the form `{"type": "function", "function": ...}`; None for none or `[]`."""
    if isinstance(tools, str) and not tools.strip():
        return None
    tools = _maybe_json(tools, "tools", "a list of JSON schemas")
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise DataError(f"column 'tools' holds {describe(tools)}: write a list of JSON schemas.")
    parsed = []
    for number, tool in enumerate(tools):
        tool = _maybe_json(tool, "tools", "a list of JSON schemas")
        if not isinstance(tool, Mapping):
            raise DataError(f"tools[{number}] is {describe(tool)}: write a JSON schema (a dict).")
        bare = "function" not in tool and "name" in tool
        parsed.append({"type": "function", "function": dict(tool)} if bare else dict(tool))
    return parsed


def parse_messages(value: Any, column: str = "messages", extra_roles: frozenset[str] = frozenset()) -> list[Message]:
    """Messages in either key style to `role`/`content` with OpenAI's tool calls; checks roles and types."""
    return _messages(value, column, extra_roles)


def _messages(value: Any, column: str, extra_roles: frozenset[str]) -> list[Message]:
    value = _maybe_json(value, column, "a list of messages")
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise DataError(f"column {column!r} holds {describe(value)}: write a list of messages (dicts).")
    if not value:
        raise DataError(f"column {column!r} is an empty list: write at least one message.")
    return [_message(message, f"{column}[{number}]", extra_roles) for number, message in enumerate(value)]


def _message(message: Any, where: str, extra_roles: frozenset[str]) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {describe(message)}: write a dict with 'role' and 'content'.")
    message = {key: value for key, value in message.items() if value is not None}
    key, wanted = "role", KNOWN_ROLES
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), **message}
        key, wanted = "from", ("system", *ROLES)
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if "role" not in message:
        raise DataError(f"{where} has no 'role' (keys: {names(message)}){_typo(message, 'role', 'from')}.")
    role = message["role"]
    if not isinstance(role, str):
        raise DataError(f"{where}['role'] is {describe(role)}: write a string such as 'user'.")
    if role == "function_call":
        return _function_call(message, where)
    message["role"] = ROLES.get(role, role)
    if message["role"] not in KNOWN_ROLES and role not in extra_roles:
        close = nearest(role, [*KNOWN_ROLES, *ROLES])
        hint = f"did you mean {close!r}? Write" if close else "write"
        raise DataError(f"{where}[{key!r}] is {role!r}, which is unknown: {hint} one of {names(wanted)}.")
    _check_content(message, where)
    if message.get("tool_calls"):
        calls = _maybe_json(message["tool_calls"], f"{where}['tool_calls']", "a list of calls")
        if not isinstance(calls, list | tuple):
            raise DataError(f"{where}['tool_calls'] is {describe(calls)}: write a list of calls.")
        message["tool_calls"] = [_tool_call(call, f"{where}['tool_calls'][{n}]") for n, call in enumerate(calls)]
    else:
        message.pop("tool_calls", None)
    return message


def _typo(message: Mapping[str, Any], *wanted: str) -> str:
    for key in message:
        close = nearest(key, wanted)
        if close:
            return f"; did you mean {close!r} by {key!r}?"
    return f"; write {wanted[0]!r}"


def _check_content(message: Message, where: str) -> None:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and (message.get("tool_calls") or any(key in message for key in REASONING)):
            return
        others = {key: None for key in message if key != "role"}
        raise DataError(
            f"{where} ({message['role']}) has no 'content' (keys: {names(message)}){_typo(others, 'content', 'value')}."
        )
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise DataError(f"{where}['content'] is {describe(content)}: write a string, or a list of text parts.")
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            raise DataError(
                f"{where}['content'] holds {describe(part)}: write parts of the form "
                "{'type': 'text', 'text': ...}; images, audio and video are not supported."
            )
    message["content"] = [{"type": "text", "text": part["text"]} for part in content]


def _function_call(message: Message, where: str) -> Message:
    value = message.get("content")
    calls = value
    if isinstance(value, str):
        try:
            calls = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where} is a function_call whose value is not JSON ({error}): "
                'write {"name": ..., "arguments": {...}}.'
            ) from None
    calls = calls if isinstance(calls, list) else [calls]
    calls = [_tool_call(call, f"{where} call {number}") for number, call in enumerate(calls)]
    rest = {key: item for key, item in message.items() if key not in ("role", "content")}
    return {"role": "assistant", "content": "", **rest, "tool_calls": calls}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    wanted = 'write {"type": "function", "function": {"name": ..., "arguments": {...}}}'
    if not isinstance(call, Mapping):
        raise DataError(f"{where} is {describe(call)}: {wanted}.")
    outer = {key: value for key, value in call.items() if value is not None}
    function = outer.pop("function", None)
    if function is None:
        function = {key: outer.pop(key) for key in ("name", "arguments", "parameters") if key in outer}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has no function name: {wanted}.")
    function = dict(function)
    arguments = function.pop("parameters", None) if "arguments" not in function else function.pop("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: arguments are a string that is not JSON ({error}): write an object.") from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: arguments are {describe(arguments)}: write a dict, or a JSON object as a string.")
    function["arguments"] = dict(arguments)
    return {**outer, "type": "function", "function": function}


# Prompt and completion


def _pair(row: Mapping[str, Any], roles: frozenset[str]) -> Text | Chat:
    for column, other in (("prompt", "completion"), ("completion", "prompt")):
        if column not in row:
            close = next((key for key in row if key != other and nearest(key, [column])), None)
            hint = f" ({close!r} looks like it)" if close else ""
            raise DataError(f"column {column!r} is missing beside {other!r}{hint}: its columns are {names(row)}.")
    return _join(row, "prompt", "completion", roles)


def _join(row: Mapping[str, Any], ahead: str, column: str, roles: frozenset[str]) -> Text | Chat:
    """What column `ahead` holds, followed by the completion in another column."""
    prompt, completion = row[ahead], row[column]
    if ahead != "prompt":
        prompt = _maybe_json(prompt, ahead, "a list of messages")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(prompt, prompt + completion)
    after = [] if isinstance(completion, str) else _messages(completion, column, roles)
    if isinstance(prompt, str):
        asked = [n for n, message in enumerate(after[:-1]) if _is_user(message, prompt)]
        if asked:  # the whole conversation, which shows the prompt itself
            return _chat(row, after, roles, asked[-1] + 1)
    if isinstance(prompt, str) or not after:
        raise DataError(
            f"columns {ahead!r} and {column!r} hold {describe(prompt)} and {describe(completion)}: "
            "write two strings or two lists of messages."
        )
    before = _messages(prompt, ahead, roles)
    if len(after) > len(before) and after[: len(before)] == before:
        after = after[len(before) :]
    return _chat(row, before + after, roles, len(before))


def _is_user(message: Message, text: str) -> bool:
    content = message.get("content")
    return message["role"] == "user" and isinstance(content, str) and content.strip() == text.strip()


def parse_side(row: Mapping[str, Any], column: str, roles: frozenset[str]) -> Text | Chat:
    """One side of a preference row; without a prompt column it is the whole conversation or text."""
    ahead = next((key for key in ("prompt", "conversations", "messages") if key in row), None)
    side = row[column]
    if ahead is not None:
        return _join(row, ahead, column, roles)
    if isinstance(side, str):
        if isinstance(row.get("instruction"), str):
            return _alpaca({**row, "output": side}, roles)
        return Text(None, side)
    return _chat(row, _messages(side, column, roles), roles)


def _alpaca(row: Mapping[str, Any], roles: frozenset[str]) -> Chat:
    """User: the instruction, then on a new line the input when there is one. Assistant: the output."""
    if "output" not in row:
        close = next((key for key in row if nearest(key, ["output"])), None)
        hint = f" ({close!r} looks like it)" if close else ""
        raise DataError(f"column 'output' is missing beside 'instruction'{hint}: its columns are {names(row)}.")
    for column in ("instruction", "input", "output"):
        if column in row and not isinstance(row[column], str):
            raise DataError(f"column {column!r} holds {describe(row[column])}: write a string.")
    turns: list[Message] = []
    for pair in row.get("history") or []:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(side, str) for side in pair)):
            raise DataError(f"column 'history' holds {describe(pair)}: write pairs of strings [instruction, output].")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    user = row["instruction"] + ("\n" + row["input"] if row.get("input") else "")
    turns += [{"role": "user", "content": user}, {"role": "assistant", "content": row["output"]}]
    return _chat(row, turns, roles, len(turns) - 1)


# Token ids


def _tokens(row: Mapping[str, Any]) -> Tokens:
    ids = parse_ids(row, "input_ids")
    mask = [True] * len(ids)
    for column in ("labels", "completion_mask", "assistant_masks", "loss_mask"):
        if column not in row:
            continue
        values = parse_list(row[column])
        if len(values) != len(ids):
            raise DataError(
                f"column {column!r} has {len(values)} entries, 'input_ids' has {len(ids)}: make them equal."
            )
        if column == "labels":
            wrong = next((n for n, (a, b) in enumerate(zip(values, ids, strict=True)) if a not in (-100, b)), None)
            if wrong is not None:
                raise DataError(
                    f"labels[{wrong}] is {values[wrong]!r}, input_ids[{wrong}] is {ids[wrong]}: "
                    "a label is -100 or the token at its own position (the shift is made later)."
                )
            values = [value != -100 for value in values]
        mask = [kept and bool(value) for kept, value in zip(mask, values, strict=True)]
    lengths = row.get("seq_lengths")
    if lengths is not None:
        lengths = parse_list(lengths)
        if sum(lengths) != len(ids):
            raise DataError(f"column 'seq_lengths' sums to {sum(lengths)}, 'input_ids' has {len(ids)} entries.")
    return Tokens(ids, mask, lengths)


def parse_ids(row: Mapping[str, Any], column: str) -> list[int]:
    """A column of token ids."""
    ids = parse_list(row[column])
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise DataError(f"column {column!r} holds something that is no token id: write a list of integers from 0 up.")
    return ids


def parse_list(value: Any) -> list[Any]:
    """A list, tuple or array as a list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise DataError(f"a token column holds {describe(value)}: write a list.")
    return list(value)

"""Values of a configuration's fields, checked against its annotations, so that every option has one check of types."""

import difflib
import functools
import json
import numbers
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

SHOWN = 60  # characters of a value that an error quotes
MANY = 12  # legal values that an error lists; of more it names the nearest

# Options that take the name of a JSON file instead of the mapping it holds.
FILES = ("accelerator_config", "deepspeed", "fsdp_config")
# Annotated for the command line; in Python transformers takes other objects as well, and leaves some behind itself.
OBJECTS = ("accelerator_config", "fsdp", "resume_from_checkpoint")

WORDS = {
    bool: ["True", "False"],
    int: ["a whole number"],
    float: ["a number"],
    str: ["text"],
    type(None): ["None"],
}


def check_types(config: Any) -> None:
    """Compares every field of a dataclass with its annotation.

    A whole number will do for a number and a path for text; text is never read as anything else, except that an option
    for mappings takes the JSON of one. A value that is the field's default is not looked at.

    Args:
        config: An instance of a dataclass.

    Raises:
        ValueError: Naming the field, its value, and what to write.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Options:
        ...     packing: bool = False
        ...     max_length: int | None = None
        >>> check_types(Options(packing=True, max_length=8))
        >>> check_types(Options(max_length="8"))
        Traceback (most recent call last):
        ValueError: max_length='8': write a whole number or None
    """
    hints = _hints(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name not in hints or value is item.default:
            continue
        if isinstance(value, str | os.PathLike) and _takes_mapping(hints[item.name]):
            _check_mapping(item.name, os.fspath(value))
        elif item.name not in OBJECTS and not _fits(value, hints[item.name]):
            raise ValueError(f"{item.name}={_quoted(value)}: write {_expected(hints[item.name], value)}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a user's own config may name types for a type checker alone
        return typing.get_type_hints(TrainingArguments) if issubclass(cls, TrainingArguments) else {}


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union. An enum beside `str` means the member or its value: no other text is legal."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return (hint,)
    members = typing.get_args(hint)
    enums = any(isinstance(member, type) and issubclass(member, Enum) for member in members)
    return tuple(member for member in members if not (enums and member is str))


def _fits(value: Any, hint: Any) -> bool:
    members = _members(hint)
    if len(members) > 1:
        return any(_fits(value, member) for member in members)
    (hint,) = members
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Literal:
        return any(value == legal and type(value) is type(legal) for legal in arguments)
    if hint is None or kind is type(None):
        return value is None
    if kind in (int, float):
        wanted = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, wanted) and not isinstance(value, bool) and value == value  # not NaN
    if kind is str:
        return isinstance(value, str | os.PathLike)
    if kind in (list, tuple, Sequence):
        return isinstance(value, list | tuple) and all(_fits(one, hint) for hint in arguments[:1] for one in value)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return isinstance(value, str) and value in [member.value for member in kind]
    return isinstance(value, kind) if isinstance(kind, type) and kind is not Any else True


def _takes_mapping(hint: Any) -> bool:
    return any((typing.get_origin(member) or member) in (dict, Mapping) for member in _members(hint))


def _check_mapping(name: str, text: str) -> None:
    if text.lstrip().startswith("{") or name not in FILES:
        try:
            known = isinstance(json.loads(text), dict)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name}={_quoted(text)} is not JSON ({error.msg}, character {error.pos + 1}): write a mapping"
            ) from None
        if not known:
            raise ValueError(f"{name}={_quoted(text)}: write a mapping, or its JSON in braces")
        return
    if not Path(text).expanduser().is_file():
        raise ValueError(f"{name}={_quoted(text)}: there is no such file: name a JSON file, or write a mapping")
    try:
        json.loads(Path(text).expanduser().read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: the file is not JSON: {error}") from None


def _expected(hint: Any, value: Any) -> str:
    members = sorted(_members(hint), key=lambda member: member in (None, type(None)))
    words = list(dict.fromkeys(word for member in members for word in _words(member, value)))
    return " or ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _words(hint: Any, value: Any) -> list[str]:
    """What a member of a union takes, in words."""
    kind = typing.get_origin(hint) or hint
    if kind is typing.Literal:
        return _nearest(list(typing.get_args(hint)), value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _nearest([member.value for member in kind], value)
    if kind in (list, tuple, Sequence):
        return ["a list of text" if typing.get_args(hint)[:1] == (str,) else "a list"]
    if kind in (dict, Mapping):
        return ["a mapping"]
    return WORDS.get(kind) or [f"an object of {getattr(kind, '__name__', kind)}"]


def _nearest(legal: list[Any], value: Any) -> list[str]:
    """Legal values as one would write them; of many, those that the value looks like."""
    if len(legal) > MANY:
        longer = [one for one in legal if str(one).startswith(str(value))]
        legal = (longer or difflib.get_close_matches(str(value), legal) or legal)[:MANY]
    return [repr(one) for one in legal]


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."

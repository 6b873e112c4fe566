"""Dataclasses to option tables: the one module that looks at the live classes (and so pays for importing them)."""

import dataclasses
import enum
import json
import pathlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from posttrain_cli.values import Type, has, members

RESERVED = {"config", "env", "help", "help_all", "version"}
SIMPLE = {bool: "bool", int: "int", float: "float", str: "str", pathlib.Path: "path", type(None): "none"}


def load(path: str) -> Any:
    """The object at `package.module:name`.

    Example:
        >>> load("math:pi") > 3
        True
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def path_of(cls: type) -> str:
    """The `package.module:name` of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def describe_type(hint: Any) -> Type:
    """A type hint as JSON-able data."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in SIMPLE or hint is None:
        return {"kind": SIMPLE.get(hint, "none")}
    if hint is Any or hint is object:
        return {"kind": "any"}
    if origin is typing.Annotated:
        return describe_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _describe_union([describe_type(argument) for argument in arguments], hint)
    if origin is typing.Literal:
        return {"kind": "choice", "values": list(arguments)}
    if hint in (list, tuple, set) or origin in (list, tuple, set, frozenset, Sequence):
        return _describe_list(hint, origin or hint, arguments)
    if hint is dict or origin in (dict, Mapping):
        return {"kind": "dict", "value": describe_type(arguments[1]) if arguments else {"kind": "any"}}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"kind": "choice", "values": [member.value for member in hint], "path": path_of(hint)}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return {"kind": "config", "path": path_of(hint), "options": describe(hint)}
    return {"kind": "unsupported", "text": getattr(hint, "__name__", str(hint))}


def _describe_list(hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Type:
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return {"kind": "unsupported", "text": str(hint)}
    item = describe_type(arguments[0]) if arguments else {"kind": "any"}
    if item["kind"] == "unsupported":
        return item
    container = origin.__name__ if origin in (tuple, set, frozenset) else "list"
    return {"kind": "list", "item": item, "container": container}


def _describe_union(of: list[Type], hint: Any) -> Type:
    flat = [member for one in of for member in members(one)]
    known = [member for member in flat if member["kind"] != "unsupported"]
    if all(member["kind"] == "none" for member in known):
        return {"kind": "unsupported", "text": str(hint)}
    # An enum beside str means "the member or its value": the values stay the only legal ones.
    if any("path" in member and member["kind"] == "choice" for member in known):
        known = [member for member in known if member["kind"] != "str"]
    return known[0] if len(known) == 1 else {"kind": "union", "of": known}


def describe(cls: type) -> list[dict[str, Any]]:
    """The options of a dataclass: name, type, default, help, and the package of the class that declares it."""
    hints = typing.get_type_hints(cls, include_extras=True)
    documented = _documented(cls)
    options = []
    for field in dataclasses.fields(cls):  # ty: ignore[invalid-argument-type]
        if not field.init or field.name.startswith("_"):
            continue
        option: dict[str, Any] = {"name": field.name, "type": describe_type(hints[field.name])}
        option["package"] = _owner(cls, field).__module__.partition(".")[0]
        if field.default is not dataclasses.MISSING:
            option["default"] = _plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            option["default"] = _plain(field.default_factory())
        else:
            option["required"] = True
        # argparse, for which transformers writes its texts, wants a per cent sign doubled.
        text = str(field.metadata.get("help") or documented.get(field.name, "")).replace("%%", "%")
        option["help"] = " ".join(text.split())
        # Where the word "none" is itself a setting (report_to), it must not turn into the absence of one.
        if option.get("default") == "none" and has(option["type"], "str"):
            option["type"] = _describe_union([m for m in members(option["type"]) if m["kind"] != "none"], cls)
        options.append(option)
    return options


def _owner(cls: type, field: dataclasses.Field) -> type:
    """The class that declares a field: the last one up the bases that holds this very object."""
    holders = [base for base in cls.__mro__ if vars(base).get("__dataclass_fields__", {}).get(field.name) is field]
    return holders[-1]


def _plain(value: Any) -> Any:
    """A default as the table shows it."""
    if isinstance(value, enum.Enum):
        value = value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return str(value)


def _documented(cls: type) -> dict[str, str]:
    """The descriptions of fields in the `Args:` or `Attributes:` sections of the class and its bases."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for name, text in _sections(base.__dict__.get("__doc__") or "").items():
            found.setdefault(name, text)
    return found


def _sections(doc: str) -> dict[str, str]:
    found: dict[str, str] = {}
    indent: int | None = None  # that of the entries of the section being read
    inside, name = False, ""
    for line in doc.expandtabs().splitlines():
        depth = len(line) - len(line.lstrip())
        text = line.strip()
        if text in ("Args:", "Arguments:", "Attributes:", "Parameters:"):
            inside, indent, name = True, None, ""
        elif inside and text:
            indent = depth if indent is None else indent
            entry = re.match(r"(\w+)\s*(?:\(.*?\))?\s*:(?:\s+(.*))?$", text)
            if depth < indent:
                inside = False
            elif depth == indent and entry:
                name = entry[1]
                found[name] = entry[2] or ""
            elif name:
                found[name] += " " + text
    return found


def make_options(configs: Mapping[str, str]) -> list[dict[str, Any]]:
    """The options of several configs as one flat list; a name that several share is one option that fills each of them.

    Raises:
        ValueError: If two configs mean different things by one name, or a field has a name that the command line uses.
    """
    table: dict[str, dict[str, Any]] = {}
    for group, path in configs.items():
        cls = load(path)
        home = cls.__module__.partition(".")[0]
        # A config's own fields come before those of its bases.
        for option in sorted(describe(cls), key=lambda option: option["package"] != home):
            name = option["name"]
            if name in RESERVED:
                raise ValueError(f"{path}.{name}: a field cannot have this name, which the command line uses itself")
            # posttrain_sft and posttrain_data are one family; what comes from outside it is shown by --help-all alone.
            option["inherited"] = option["package"].partition("_")[0] != home.partition("_")[0]
            option["groups"] = [group]
            known = table.setdefault(name, option)
            if known is not option:
                if any(known.get(key) != option.get(key) for key in ("type", "default", "required")):
                    raise ValueError(
                        f"{path}.{name}: differs in type or default from the option of that name in "
                        f"{configs[known['groups'][0]]}; one flag would fill both, so they must agree"
                    )
                known["groups"].append(group)
    for option in table.values():
        del option["package"]
    return list(table.values())


def packages_of(configs: Mapping[str, str]) -> set[str]:
    """The top-level packages whose classes the configs inherit from or hold."""
    return {
        module
        for path in configs.values()
        for base in load(path).__mro__
        if (module := base.__module__.partition(".")[0]) != "builtins"
    }

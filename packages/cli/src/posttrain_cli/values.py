"""Text, JSON and YAML to typed values, strictly.

A value arrives as a tree: a `Scalar`, a list of trees, or a dict of trees. A `Scalar` keeps the text as it was written,
so that the command line, JSON and YAML are converted by one set of rules, and YAML 1.1's guesses (`no` is false, `2e-5`
is text) never reach an option. A type is a JSON-able dict made by `posttrain_cli.schema`; its `kind` is one of the keys
of `CONVERTERS`.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}
MANY = 12  # choices beyond this are told by --help-all alone


class Scalar(NamedTuple):
    """One value as it was written, and what it stands for where any type is allowed."""

    text: str
    native: Any
    quoted: bool = False  # in quotes in YAML or JSON, so that none is a word and not the absence of a value


Tree: TypeAlias = "Scalar | list[Tree] | dict[str, Tree]"
Type: TypeAlias = "dict[str, Any]"


class MismatchError(ValueError):
    """A value that does not fit its type; the text says what was expected and what was found."""


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The known names most like a mistyped one, best first; those it is the beginning of come before."""
    names = sorted(names)
    longer = [known for known in names if len(name) > 2 and known.startswith(name)][:3]
    return longer or difflib.get_close_matches(name, names, n=1, cutoff=0.6)


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`; did you mean ...?`, or nothing when no name is close.

    Example:
        >>> from posttrain_cli import did_you_mean
        >>> did_you_mean("max_lenght", ["max_length", "seed"], prefix="--")
        '; did you mean --max_length?'
    """
    close = nearest(name, names)
    return f"; did you mean {' or '.join(prefix + known for known in close)}?" if close else ""


def typed(text: str) -> Scalar:
    """A word of the command line."""
    return Scalar(text, text)


def from_native(value: Any) -> Tree:
    """A tree of what `json.loads` returns."""
    if isinstance(value, dict):
        return {key: from_native(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_native(item) for item in value]
    if isinstance(value, str):
        return Scalar(value, value, quoted=True)
    return Scalar(json.dumps(value), value)


def to_native(tree: Tree) -> Any:
    """The plain Python value of a tree, for options that take anything."""
    if isinstance(tree, dict):
        return {key: to_native(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [to_native(item) for item in tree]
    return tree.native


def show(tree: Tree) -> str:
    """A tree as an error message quotes it."""
    if isinstance(tree, dict):
        return "a mapping"
    if isinstance(tree, list):
        return "a list"
    if tree.native is None:
        return "nothing"
    return repr(tree.text if len(tree.text) <= 60 else tree.text[:57] + "...")


def has(spec: Type, kind: str) -> bool:
    """Whether a type is, or as a union offers, the given kind."""
    return any(member["kind"] == kind for member in members(spec))


def members(spec: Type) -> list[Type]:
    """The alternatives of a union; any other type is its own only one."""
    return spec["of"] if spec["kind"] == "union" else [spec]


def convert(spec: Type, tree: Tree) -> Any:
    """The value of a tree under a type, as JSON-able data (`posttrain_cli.command.construct` makes objects of it).

    Raises:
        MismatchError: If the tree does not fit.
    """
    return CONVERTERS[spec["kind"]](spec, tree)


def _mismatch(spec: Type, tree: Tree) -> MismatchError:
    hint = ""
    choices = [_choice_text(value) for member in members(spec) for value in member.get("values", ())]
    if choices and isinstance(tree, Scalar):
        hint = did_you_mean(tree.text, choices)
    return MismatchError(f"expected {expected(spec)}, got {show(tree)}{hint}")


def _scalar(spec: Type, tree: Tree) -> Scalar:
    if not isinstance(tree, Scalar):
        raise _mismatch(spec, tree)
    return tree


def _none(spec: Type, tree: Tree) -> None:
    scalar = _scalar(spec, tree)
    if scalar.native is not None and (scalar.quoted or scalar.text.lower() not in ("none", "null")):
        raise _mismatch(spec, tree)


def _bool(spec: Type, tree: Tree) -> bool:
    word = _scalar(spec, tree).text.lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise _mismatch(spec, tree)


def _int(spec: Type, tree: Tree) -> int:
    text = _scalar(spec, tree).text.strip()
    if not re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text):
        raise _mismatch(spec, tree)
    return int(text)


def _float(spec: Type, tree: Tree) -> float:
    text = _scalar(spec, tree).text.strip()
    words = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf"}
    try:
        value = float(words.get(text.lower(), text))
    except ValueError:
        raise _mismatch(spec, tree) from None
    if value != value:
        raise MismatchError(f"expected a number, got {show(tree)}")
    return value


def _str(spec: Type, tree: Tree) -> str:
    scalar = _scalar(spec, tree)
    if scalar.native is None:
        raise _mismatch(spec, tree)
    return scalar.text


def _choice_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace("null", "none")


def _choice(spec: Type, tree: Tree) -> Any:
    text = _scalar(spec, tree).text
    for value in spec["values"]:
        if text == _choice_text(value) or (not isinstance(value, str) and text.lower() == _choice_text(value)):
            return value
    raise _mismatch(spec, tree)


def _json(spec: Type, scalar: Scalar) -> Tree:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise MismatchError(f"key {twice[0]!r} is given twice in {show(scalar)}")
        return dict(pairs)

    try:
        return from_native(json.loads(scalar.text, object_pairs_hook=unique))
    except json.JSONDecodeError as error:
        raise MismatchError(
            f"expected {expected(spec)}, got {show(scalar)}, which is not JSON ({error.msg}, character {error.pos + 1})"
        ) from None


def _is_json(tree: Tree, opening: str) -> bool:
    return isinstance(tree, Scalar) and tree.text.lstrip().startswith(opening)


def _list(spec: Type, tree: Tree) -> list[Any]:
    if isinstance(tree, Scalar) and _is_json(tree, "["):
        tree = _json(spec, tree)
    if isinstance(tree, dict) or (isinstance(tree, Scalar) and tree.native is None):
        raise _mismatch(spec, tree)
    values = []
    for position, item in enumerate(tree if isinstance(tree, list) else [tree], start=1):
        try:
            values.append(convert(spec["item"], item))
        except MismatchError as error:
            raise MismatchError(f"item {position}: {error}") from None
    return values


def _mapping(spec: Type, tree: Tree) -> dict[str, Tree]:
    if isinstance(tree, Scalar) and _is_json(tree, "{"):
        tree = _json(spec, tree)
    if not isinstance(tree, dict):
        raise _mismatch(spec, tree)
    return tree


def _dict(spec: Type, tree: Tree) -> dict[str, Any]:
    values = {}
    for key, item in _mapping(spec, tree).items():
        try:
            values[key] = convert(spec["value"], item)
        except MismatchError as error:
            raise MismatchError(f"{key}: {error}") from None
    return values


def _config(spec: Type, tree: Tree) -> dict[str, Any]:
    options = {option["name"]: option for option in spec["options"]}
    values = {}
    for key, item in _mapping(spec, tree).items():
        if key not in options:
            raise MismatchError(f"unknown key {key!r}{did_you_mean(key, options)} (known: {', '.join(options)})")
        try:
            values[key] = convert(options[key]["type"], item)
        except MismatchError as error:
            raise MismatchError(f"{key}: {error}") from None
    missing = [name for name, option in options.items() if option.get("required") and name not in values]
    if missing:
        raise MismatchError(f"key {missing[0]!r} is missing")
    return values


def _any(spec: Type, tree: Tree) -> Any:
    if isinstance(tree, Scalar) and tree.native == tree.text and not tree.quoted:
        try:
            return json.loads(tree.text)
        except json.JSONDecodeError:
            return tree.text
    return to_native(tree)


def _unsupported(spec: Type, tree: Tree) -> Any:
    raise MismatchError(f"takes a Python object ({spec['text']}); set it in a script, not here")


def _shaped(spec: Type, tree: Tree) -> list[str]:
    """The kinds a tree can be, in the order in which they are tried."""
    if isinstance(tree, dict):
        return ["config", "dict", "any"]
    if isinstance(tree, list):
        return ["list", "any"]
    kinds = ["none", "choice", "bool", "int", "float"]
    if has(spec, "str") and tree.text.lower() not in ("true", "false"):
        kinds.remove("bool")
    for opening, structured in (("{", ["config", "dict"]), ("[", ["list"])):
        if _is_json(tree, opening):
            kinds += structured
    if not _is_json(tree, "{") or not (has(spec, "dict") or has(spec, "config")):
        kinds += ["path", "str", "any", "list"]
    return kinds


def _union(spec: Type, tree: Tree) -> Any:
    kinds = _shaped(spec, tree)
    fitting = sorted((m for m in members(spec) if m["kind"] in kinds), key=lambda member: kinds.index(member["kind"]))
    failures = []
    for member in fitting:
        try:
            return convert(member, tree)
        except MismatchError as error:
            failures.append((member, error))
    told = [error for member, error in failures if member["kind"] in ("config", "dict", "list")]
    if told and (not isinstance(tree, Scalar) or _is_json(tree, "{") or _is_json(tree, "[")):
        raise told[0]
    raise _mismatch(spec, tree)


CONVERTERS: dict[str, Callable[[Type, Tree], Any]] = {
    "none": _none,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": _str,
    "path": _str,
    "choice": _choice,
    "list": _list,
    "dict": _dict,
    "config": _config,
    "any": _any,
    "union": _union,
    "unsupported": _unsupported,
}

WORDS = {
    "none": "none",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "path": "a path",
    "dict": "a mapping (JSON on the command line)",
    "config": "a mapping (JSON on the command line)",
    "any": "any value",
}
METAVARS = {
    "none": "none",
    "bool": "true|false",
    "int": "INT",
    "float": "NUMBER",
    "str": "TEXT",
    "path": "PATH",
    "dict": "JSON",
    "config": "JSON",
    "any": "VALUE",
}


def expected(spec: Type) -> str:
    """What a type takes, in words for an error message."""
    kind = spec["kind"]
    if kind == "choice":
        texts = [_choice_text(value) for value in spec["values"]]
        if len(texts) > MANY:
            return f"one of {len(texts)} names (--help-all lists them)"
        return texts[0] if len(texts) == 1 else "one of " + ", ".join(texts)
    if kind == "list":
        return f"a list (each item: {expected(spec['item'])})"
    if kind == "union":
        return " or ".join(dict.fromkeys(expected(member) for member in _none_last(spec)))
    return WORDS.get(kind, spec.get("text", kind))


def metavar(spec: Type, full: bool = True) -> str:
    """What a type takes, in short for the help; a long list of names only where `full` is true."""
    kind = spec["kind"]
    if kind == "choice" and len(spec["values"]) > MANY and not full:
        return "NAME"
    if kind == "choice":
        return "|".join(_choice_text(value) for value in spec["values"])
    if kind == "list":
        return f"{metavar(spec['item'], full)} ..."
    if kind == "union":
        return "|".join(dict.fromkeys(metavar(member, full) for member in _none_last(spec)))
    return METAVARS.get(kind, spec.get("text", kind))


def _none_last(spec: Type) -> list[Type]:
    return sorted(members(spec), key=lambda member: member["kind"] == "none")

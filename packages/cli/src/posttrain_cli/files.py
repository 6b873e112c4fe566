"""YAML configuration files, read as they were written: every scalar keeps its text, every key its line."""

import re
from pathlib import Path
from typing import NamedTuple

import yaml
from yaml.reader import ReaderError

from posttrain_cli.errors import CommandError
from posttrain_cli.values import Scalar, Tree

TAG = "tag:yaml.org,2002:"
SCALARS = {TAG + kind for kind in ("str", "null", "bool", "int", "float", "timestamp")}
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class Entry(NamedTuple):
    """The value of one top-level key and the line of the key."""

    value: Tree
    line: int


def read_yaml(path: str) -> dict[str, Entry]:
    """The top-level keys of a YAML file; an empty file has none.

    Raises:
        CommandError: If the file is missing, is not UTF-8, is not YAML, is not a mapping, or gives a key twice. The
            text names the file and, where there is one, the line.
    """
    text = _text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None or root.tag == TAG + "null":
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise CommandError(f"{path}:{_line(root)}: expected `key: value` lines, got {_kind(root)}")
        return {key: Entry(_tree(path, node, [root]), line) for key, node, line in _pairs(path, root)}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise CommandError(f"{path}:{line}: invalid YAML: {error.problem or error.context}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise CommandError(f"{path}:{line}: invalid YAML: {error.reason}") from None


def _text(path: str) -> str:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise CommandError(f"--config {path}: there is no such file") from None
    except OSError as error:
        raise CommandError(f"--config {path}: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CommandError(f"{path}:{line}: byte {data[error.start]:#x} is not UTF-8; save the file as UTF-8") from None


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _pairs(path: str, node: yaml.MappingNode) -> list[tuple[str, yaml.Node, int]]:
    """Keys, values and lines of a mapping, `<<` merged in; keys given here win over merged ones."""
    own: dict[str, tuple[str, yaml.Node, int]] = {}
    merged: dict[str, tuple[str, yaml.Node, int]] = {}
    for key, value in node.value:
        if key.tag == TAG + "merge":
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in sources:
                if not isinstance(source, yaml.MappingNode):
                    raise CommandError(f"{path}:{_line(key)}: `<<` takes a mapping, got {_kind(source)}")
                for pair in _pairs(path, source):
                    merged.setdefault(pair[0], pair)
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise CommandError(f"{path}:{_line(key)}: a key must be a word, got {_kind(key)}")
        if key.value in own:
            first = own[key.value][2]
            raise CommandError(f"{path}:{_line(key)}: key {key.value!r} is given twice (first on line {first})")
        own[key.value] = (key.value, value, _line(key))
    return list({**merged, **own}.values())


def _tree(path: str, node: yaml.Node, above: list[yaml.Node]) -> Tree:
    if node in above:
        raise CommandError(f"{path}:{_line(node)}: an alias (`*name`) contains itself")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(path, node)
    if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
        return [_tree(path, item, [*above, node]) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
        return {key: _tree(path, value, [*above, node]) for key, value, _ in _pairs(path, node)}
    raise CommandError(f"{path}:{_line(node)}: the tag {node.tag.removeprefix(TAG)!r} is not supported")


def _scalar(path: str, node: yaml.ScalarNode) -> Scalar:
    if node.tag not in SCALARS:
        raise CommandError(f"{path}:{_line(node)}: the tag {node.tag.removeprefix(TAG)!r} is not supported")
    text, kind, quoted = node.value, node.tag.removeprefix(TAG), node.style is not None
    native: object = text
    if kind in ("null", "bool", "int", "float"):
        try:
            native = yaml.SafeLoader("").construct_object(node)
        except ValueError:  # such as `!!int word`
            raise CommandError(f"{path}:{_line(node)}: {text!r} is not of type {kind}") from None
    elif kind == "str" and not quoted and EXPONENT.fullmatch(text):
        native = float(text)  # YAML 1.1 takes 2e-5, which has no point, for text
    return Scalar(text, native, quoted)

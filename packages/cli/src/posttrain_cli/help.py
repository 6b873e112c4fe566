"""The help of a command: the method's own options first, everything else on request."""

import json
import os
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain_cli.table import Option
from posttrain_cli.values import metavar

INDENT = 28
LONG = 110  # characters; a longer sentence ends at its first semicolon in the short help


def render(
    prog: str,
    summary: str,
    groups: Iterable[str],
    options: Mapping[str, Option],
    basics: Iterable[str],
    everything: bool,
) -> str:
    """The text of `--help`, or of `--help-all` where `everything` is true."""
    width = _width()
    shown = set(basics)
    lines = [f"usage: {prog} [--config FILE] [--flag value ...]", "", *textwrap.wrap(summary, width), ""]
    lines += [
        *_entry("--config FILE", "YAML file of the keys below; flags win over it", width),
        *_entry("--help, --help-all", "the options that matter most; every option with its full text", width),
    ]
    inherited = []
    for group in groups:
        own = [option for option in options.values() if option.groups[0] == group]
        inherited += [option for option in own if option.inherited]
        lines += _section(group, [option for option in own if not option.inherited], width, everything)
    inherited = [option for option in inherited if option.type["kind"] != "unsupported"]
    basic = [option for option in inherited if option.name in shown]
    lines += _section("training", inherited if everything else basic, width, everything)
    hidden = len(inherited) - len(basic)
    if hidden and not everything:
        lines += ["", f"{hidden} more training options: {prog} --help-all"]
    return "\n".join(lines) + "\n"


def _width() -> int:
    try:
        columns = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size().columns
    except (OSError, ValueError):
        columns = 100
    return max(60, min(columns, 120)) - 2


def _section(title: str, options: list[Option], width: int, full: bool) -> list[str]:
    lines = [line for option in options for line in _option(option, width, full)]
    return ["", f"{title}:", *lines] if lines else []


def _option(option: Option, width: int, full: bool) -> list[str]:
    if option.type["kind"] == "unsupported":
        return []
    flag = f"--{option.name}"
    if option.type["kind"] == "bool":
        flag = f"--[no_]{option.name}"
    else:
        flag += f" {metavar(option.type, full)}"
    text = option.help if full else _first_sentence(option.help)
    default = "required" if option.required else f"default: {_show(option.default)}"
    return _entry(flag, f"{text} ({default})".strip(), width)


def _first_sentence(text: str) -> str:
    text = text.partition(". ")[0].rstrip(".")
    text = text if len(text) <= LONG else text.partition("; ")[0]
    return textwrap.shorten(text, 160, placeholder=" ...")


def _show(default: Any) -> str:
    if default is None:
        return "none"
    if default == "":
        return "''"
    return default if isinstance(default, str) else json.dumps(default, ensure_ascii=False)


def _entry(flag: str, text: str, width: int) -> list[str]:
    body = textwrap.wrap(text, width - INDENT) or [""]
    head = _wrap_choices(flag, width)
    if len(head) == 1 and len(head[0]) < INDENT - 1:
        return [head[0].ljust(INDENT) + body[0], *(" " * INDENT + line for line in body[1:])]
    return [*head, *(" " * INDENT + line for line in body)]


def _wrap_choices(flag: str, width: int) -> list[str]:
    lines = ["  "]
    for piece in flag.replace("|", "| ").split(" "):
        joint = "" if lines[-1].endswith("|") or lines[-1] == "  " else " "
        if len(lines[-1]) + len(joint) + len(piece) > width:
            lines.append("      ")
            joint = ""
        lines[-1] += joint + piece
    return lines

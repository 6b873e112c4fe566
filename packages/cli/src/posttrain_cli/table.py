"""The option table of a command: shipped as JSON, checked against the installed versions, rebuilt when they differ.

`python -m posttrain_cli posttrain_sft.command:COMMAND` writes the table that an app ships.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from posttrain_cli.errors import CommandError

FORMAT = 1
PATIENCE = 600.0  # seconds that the packages may take to be imported


class Option(NamedTuple):
    """One option: a field of one config, or of several that share its name."""

    name: str
    type: dict[str, Any]
    groups: list[str]
    help: str = ""
    default: Any = None
    required: bool = False
    inherited: bool = False


def load_table(name: str, configs: Mapping[str, str], shipped: Path | None) -> dict[str, Option]:
    """The options of a command by name, from the shipped table, from the user's cache, or rebuilt into it.

    Raises:
        CommandError: If the table must be rebuilt and a config cannot be imported.
    """
    paths = [path for path in (shipped, _cached(name, configs)) if path is not None]
    for path in paths:
        table = _read(path)
        if table is not None and _fits(table, configs):
            return _options(table)
    return _options(_rebuild(name, configs, paths[-1]))


def make_table(configs: Mapping[str, str]) -> dict[str, Any]:
    """The table of the live classes, which this imports (torch and transformers with them, where they do).

    Example:
        >>> from posttrain_cli import make_table
        >>> table = make_table({"demo": "posttrain_cli.examples:DemoConfig"})
        >>> [option["name"] for option in table["options"]]
        ['learning_rate', 'layers', 'shuffle']
    """
    from posttrain_cli.schema import make_options, packages_of

    owners = metadata.packages_distributions()
    # An editable install does not list its packages; its distribution has the package's name.
    found = {owners.get(package, [package.replace("_", "-")])[0] for package in packages_of(configs)}
    versions = {distribution: version for distribution in sorted(found) if (version := _version(distribution))}
    return {
        "format": FORMAT,
        "configs": dict(configs),
        "versions": versions,
        "options": make_options(configs),
    }


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write a table in one step, so that a reader never sees a part of it; one option a line, for small diffs.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from posttrain_cli import make_table, write_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "options.json")
        ...     write_table(make_table({"demo": "posttrain_cli.examples:DemoConfig"}), path)
        ...     len(json.loads(path.read_text())["options"])
        3
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({key: value for key, value in table.items() if key != "options"}, indent=1)
    rows = ",\n  ".join(json.dumps(option, ensure_ascii=False) for option in table["options"])
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(f'{head[:-2]},\n "options": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
    os.replace(part, path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _fits(table: dict[str, Any], configs: Mapping[str, str]) -> bool:
    if table.get("format") != FORMAT or table.get("configs") != dict(configs):
        return False
    return all(_version(distribution) == version for distribution, version in table["versions"].items())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _options(table: Mapping[str, Any]) -> dict[str, Option]:
    return {option["name"]: Option(**option) for option in table["options"]}


def _cached(name: str, configs: Mapping[str, str]) -> Path:
    """One file for each command and environment; it says itself for which versions it holds."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    key = hashlib.sha256(json.dumps([FORMAT, dict(configs), sys.prefix]).encode()).hexdigest()[:12]
    return Path(base, "posttrain", f"options-{name}-{key}.json")


def _rebuild(name: str, configs: Mapping[str, str], cache: Path) -> dict[str, Any]:
    """Build the table in a process of its own: parsing must not import torch, which reads the environment only once."""
    import subprocess
    import tempfile

    print(f"{name}: reading its options from the installed packages (once for these versions) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "options.json")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "posttrain_cli", json.dumps(dict(configs)), str(out)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            modules = ", ".join(sorted({path.partition(":")[0] for path in configs.values()}))
            raise CommandError(
                f"the options of {name} cannot be read: importing {modules} took more than {PATIENCE:g} s"
            ) from None
        table = _read(out)
    if done.returncode or table is None:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CommandError(f"the options of {name} cannot be read: {lines[-1]}")
    try:
        write_table(table, cache)
    except OSError as error:
        print(f"{name}: the options could not be kept for the next time ({error})", file=sys.stderr)
    return table


def main(arguments: list[str]) -> None:
    """Write the table of `package.module:COMMAND` into its place, or that of configs given as JSON to a path."""
    if len(arguments) == 2:
        write_table(make_table(json.loads(arguments[0])), Path(arguments[1]))
        return
    from posttrain_cli.schema import load

    if len(arguments) != 1 or (command := load(arguments[0])).table is None:
        raise SystemExit("usage: python -m posttrain_cli package.module:COMMAND   (a command that names a table)")
    write_table(make_table(command.groups), command.table)
    print(f"wrote {command.table}")

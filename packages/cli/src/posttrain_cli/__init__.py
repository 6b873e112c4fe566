"""Command lines and YAML files to dataclass configs, strictly, without importing torch."""

from posttrain_cli.command import Command, Parsed, guarded
from posttrain_cli.errors import CommandError, mistakes
from posttrain_cli.lazy import lazy_exports
from posttrain_cli.schema import load
from posttrain_cli.table import make_table, write_table
from posttrain_cli.values import did_you_mean

__all__ = [
    "Command",
    "CommandError",
    "Parsed",
    "did_you_mean",
    "guarded",
    "lazy_exports",
    "load",
    "make_table",
    "mistakes",
    "write_table",
]

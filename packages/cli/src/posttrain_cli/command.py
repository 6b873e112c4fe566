"""A command described by strings, and what a command line says about it."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain_cli.errors import CommandError
from posttrain_cli.table import Option, load_table
from posttrain_cli.values import MismatchError, Scalar, Tree, convert, did_you_mean, has, typed

# What `--help` shows of the options that a config inherits from transformers.TrainingArguments.
BASICS = (
    "output_dir",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "bf16",
    "activation_checkpointing",
    "gradient_checkpointing",
    "torch_compile",
    "logging_steps",
    "report_to",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "resume_from_checkpoint",
    "push_to_hub",
    "seed",
)


@dataclass(frozen=True)
class Command:
    """A command that can be parsed and explained without importing what it runs.

    Attributes:
        name: The word after `posttrain`, such as `"sft"`.
        summary: One sentence for the help.
        configs: Group name -> `"package.module:Dataclass"`. Each field is an option; a name that two dataclasses share
            is one option that fills both.
        run: `"package.module:function"`, called with one config a group, in this order. Its package must be runnable as
            `python -m package`, which is how a launcher starts the other processes.
        plan: The function that describes the run instead, called with the same configs and `world_size=`.
        launcher: The dataclass of the launcher's flags, which are parsed with the others but not passed to `run`.
        table: The JSON file of the options that the app ships; made by `python -m posttrain_cli`.
        replaced: A name that other libraries use, or a field that is not to be set -> what to write instead; flags and
            YAML keys of that name are errors with this text.
        basics: The inherited options that `--help` shows; `--help-all` shows every one.

    Example:
        >>> from posttrain_cli import Command
        >>> command = Command("demo", "Show it.", {"demo": "posttrain_cli.examples:DemoConfig"}, run="builtins:print")
        >>> parsed = command.parse(["--learning-rate", "2e-5", "--layers", "q", "k"])
        >>> parsed.values
        {'demo': {'learning_rate': 2e-05, 'layers': ['q', 'k']}}
        >>> parsed.build()
        (DemoConfig(learning_rate=2e-05, layers=['q', 'k'], shuffle=True),)
    """

    name: str
    summary: str
    configs: Mapping[str, str]
    run: str
    plan: str | None = None
    launcher: str | None = None
    table: Path | None = None
    replaced: Mapping[str, str] = field(default_factory=dict)
    basics: Sequence[str] = BASICS

    @property
    def groups(self) -> dict[str, str]:
        """All dataclasses whose fields are options, the launcher's last."""
        return {**self.configs, **({"launcher": self.launcher} if self.launcher else {})}

    @property
    def package(self) -> str:
        """The top-level package of `run`: `python -m package` is the command."""
        return self.run.partition(":")[0].partition(".")[0]

    @cached_property
    def options(self) -> dict[str, Option]:
        """The option table, by name, without what is replaced."""
        table = load_table(self.name, self.groups, self.table)
        return {name: option for name, option in table.items() if name not in self.replaced}

    def parse(self, argv: Sequence[str], prog: str | None = None) -> "Parsed":
        """Read a command line and the YAML file it names; imports neither the configs nor what they need.

        Args:
            argv: The words after the command.
            prog: What the help calls the command; `posttrain <name>` by default.

        Raises:
            CommandError: On any mistake, with one line that says what to write instead.
            SystemExit: With code 0, after `--help`, `--help-all` or `--version` printed what was asked for.
        """
        return parse(self, list(argv), prog or f"posttrain {self.name}")

    def main(self, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
        """Parse, build and run in this process; return the exit code (2 and a line on stderr for a mistake)."""
        return guarded(lambda: self.parse(sys.argv[1:] if argv is None else argv, prog).run(), prog or self.name)


@dataclass(frozen=True)
class Parsed:
    """What a command line and its file set.

    Attributes:
        command: The command.
        values: Group -> option -> value, of the options that were set and no others.
        sources: Option -> where it was set: `"command line"` or `"run.yaml:3"`.
        env: The `env:` mapping of the file.
    """

    command: Command
    values: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, str]
    env: Mapping[str, str]

    def build(self) -> tuple[Any, ...]:
        """Export `env` to `os.environ`, import the config classes, and make one instance of each, in order.

        Raises:
            CommandError: If a config refuses its values (a `ValueError`, `TypeError` or `ImportError` of its own).
        """
        os.environ.update(self.env)
        return tuple(self._build(group) for group in self.command.configs)

    def launch_options(self) -> Any:
        """An instance of the launcher's dataclass."""
        return self._build("launcher")

    def run(self) -> int:
        """Build the configs and call the command's function with them; its return value, or 0, is the exit code."""
        from posttrain_cli.schema import load

        configs = self.build()
        return load(self.command.run)(*configs) or 0

    def _build(self, group: str) -> Any:
        from posttrain_cli.schema import load

        cls = load(self.command.groups[group])
        options = self.command.options
        try:
            return cls(**{name: construct(options[name].type, value) for name, value in self.values[group].items()})
        except (ValueError, TypeError, ImportError) as error:
            raise CommandError(" ".join(str(error).split()) or repr(error)) from error


def construct(spec: dict[str, Any], value: Any) -> Any:
    """The Python object of a converted value: enums, paths, tuples and nested configs are made here."""
    from posttrain_cli.schema import load

    kind = spec["kind"]
    if value is None:
        return None
    if kind == "union":
        fitting = {list: ("list",), dict: ("config", "dict", "any"), str: ("path", "choice", "str")}
        wanted = fitting.get(value.__class__, ())
        chosen = [member for kind in wanted for member in spec["of"] if member["kind"] == kind]
        return construct(chosen[0], value) if chosen else value
    if kind == "choice" and "path" in spec:
        return load(spec["path"])(value)
    if kind == "path":
        return Path(value)
    if kind == "list":
        items = [construct(spec["item"], item) for item in value]
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[spec["container"]](items)
    if kind == "config":
        types = {option["name"]: option["type"] for option in spec["options"]}
        return load(spec["path"])(**{name: construct(types[name], item) for name, item in value.items()})
    return value


def guarded(action: Callable[[], int], prog: str) -> int:
    """Run a command's action and return its exit code.

    0 after a help, 2 and a line on stderr for a `CommandError`, 130 and a line for Ctrl-C.

    Example:
        >>> from posttrain_cli import CommandError, guarded
        >>> def action():
        ...     raise CommandError("there is no method 'sfr'")
        >>> guarded(action, "posttrain")
        2
    """
    try:
        return action()
    except SystemExit as stop:
        if stop.code:
            raise
        return 0
    except CommandError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # such as `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parse(command: Command, argv: list[str], prog: str) -> Parsed:
    """See `Command.parse`."""
    _answer_questions(command, argv, prog)
    typed_flags, config = _read_flags(command, argv)
    given: dict[str, tuple[Tree, str, str]] = {}  # option -> value, source, what an error calls it
    env: dict[str, str] = {}
    if config is not None:
        given, env = _read_file(command, config)
    given.update({name: (tree, "command line", flag) for name, (tree, flag) in typed_flags.items()})

    values: dict[str, dict[str, Any]] = {group: {} for group in command.groups}
    for name, option in command.options.items():
        if name in given:
            tree, _, called = given[name]
            try:
                value = convert(option.type, tree)
            except MismatchError as error:
                raise CommandError(f"{called}: {error}") from None
            for group in option.groups:
                values[group][name] = value
        elif option.required:
            raise CommandError(f"--{name} is required")
    return Parsed(command, values, {name: source for name, (_, source, _) in given.items()}, env)


def _answer_questions(command: Command, argv: list[str], prog: str) -> None:
    asked = {word.replace("-", "_") for word in argv if word.startswith("-")}
    if asked & {"_h", "__help", "__help_all"}:
        from posttrain_cli.help import render

        everything = "__help_all" in asked
        print(
            render(prog, command.summary, command.groups, command.options, command.basics, everything),
            end="",
            flush=True,
        )
        raise SystemExit(0)
    if "__version" in asked:
        from importlib import metadata

        distribution = command.package.replace("_", "-")
        print(f"{distribution} {metadata.version(distribution)}", flush=True)
        raise SystemExit(0)


def _is_flag(word: str) -> bool:
    return (word.startswith("--") and len(word) > 2) or (len(word) > 1 and word[0] == "-" and word[1].isalpha())


def _read_flags(command: Command, argv: list[str]) -> tuple[dict[str, tuple[Tree, str]], str | None]:
    """The options set by flags, each with the flag as it was typed, and the configuration file."""
    found: dict[str, tuple[Tree, str]] = {}
    config: str | None = None
    position = 0
    while position < len(argv):
        flag, joined, value = argv[position].partition("=")
        if not _is_flag(flag):
            raise CommandError(_positional(argv[position]))
        position += 1
        words = [value] if joined else []
        while not joined and position < len(argv) and not _is_flag(argv[position]):
            words.append(argv[position])
            position += 1
        name, negated = _option_name(command, flag)
        if name == "config":
            if config is not None:
                raise CommandError("--config is given twice; one file holds the whole run")
            config = _one(flag, words, "FILE")
            continue
        if name in found:
            raise CommandError(
                f"{flag} is given twice" if found[name][1] == flag else f"{found[name][1]} and {flag} clash"
            )
        found[name] = (_flag_value(command.options[name], flag, words, negated), flag)
    return found, config


def _positional(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"unexpected {word!r}; did you mean --config {word}?"
    return f"unexpected {word!r}; values follow a flag: --flag {word}"


def _option_name(command: Command, flag: str) -> tuple[str, bool]:
    name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
    if name == "config" or name in command.options:
        return name, False
    positive = name.removeprefix("no_")
    option = command.options.get(positive) if positive != name else None
    if option is not None and has(option.type, "bool"):
        return positive, True
    if name in command.replaced:
        raise CommandError(f"{flag}: {command.replaced[name]}")
    hint = did_you_mean(name or flag.lstrip("-"), [*command.options, "config", "help", "help_all", "version"], "--")
    raise CommandError(f"unknown flag {flag}{hint}")


def _flag_value(option: Option, flag: str, words: list[str], negated: bool) -> Tree:
    if negated:
        if words:
            raise CommandError(f"{flag} takes no value, got {words[0]!r}; write --{option.name} {words[0]}")
        return typed("false")
    if not words and has(option.type, "bool"):
        return typed("true")
    if len(words) > 1 and has(option.type, "list"):
        return [_word(word) for word in words]
    from posttrain_cli.values import metavar

    return _word(_one(flag, words, metavar(option.type, full=False)))


def _word(word: str) -> Scalar:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        raise CommandError(f"{word!r} is not UTF-8 text") from None
    return typed(word)


def _one(flag: str, words: list[str], metavar: str) -> str:
    if not words:
        raise CommandError(f"{flag} needs a value: {flag} {metavar}")
    if len(words) > 1:
        raise CommandError(f"{flag} takes one value, got {len(words)}: {' '.join(words)}")
    return words[0]


def _read_file(command: Command, path: str) -> tuple[dict[str, tuple[Tree, str, str]], dict[str, str]]:
    """The options that a YAML file sets, and its `env` mapping."""
    from posttrain_cli.files import read_yaml

    given: dict[str, tuple[Tree, str, str]] = {}
    env: dict[str, str] = {}
    for key, (tree, line) in read_yaml(path).items():
        name, source = key.replace("-", "_"), f"{path}:{line}"
        if name == "env":
            env = _environment(tree, source)
        elif name in given:
            raise CommandError(f"{source}: key {name!r} is given twice")
        elif name in command.options:
            given[name] = (tree, source, f"{source}: {key}")
        elif name in command.replaced:
            raise CommandError(f"{source}: {key}: {command.replaced[name]}")
        else:
            raise CommandError(f"{source}: unknown key {key!r}{did_you_mean(name, [*command.options, 'env'])}")
    return given, env


def _environment(tree: Tree, source: str) -> dict[str, str]:
    if isinstance(tree, Scalar) and tree.native is None:
        return {}
    if not isinstance(tree, dict):
        raise CommandError(f"{source}: env: expected a mapping of variables to values")
    for name, value in tree.items():
        if (
            not isinstance(value, Scalar)
            or value.native is None
            or not name
            or "=" in name
            or "\0" in name + value.text
        ):
            raise CommandError(f"{source}: env: {name}: expected a variable and one value, such as `HF_HOME: /data/hf`")
    return {name: value.text for name, value in tree.items() if isinstance(value, Scalar)}

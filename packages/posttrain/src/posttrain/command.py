"""The `posttrain` command: finds the method named by the first word, without importing torch."""

import sys
from collections.abc import Sequence

from posttrain_cli import Command, CommandError, did_you_mean, guarded, load
from posttrain_launchers import launch_options, run_command, world_size

METHODS = {
    "sft": "posttrain_sft.command:COMMAND",
    "dpo": "posttrain_dpo.command:COMMAND",
    "kto": "posttrain_kto.command:COMMAND",
    "reward": "posttrain_reward.command:COMMAND",
}
OTHERS = {
    "plan": "`posttrain plan METHOD ...` describes a run without running it",
    "env": "what is installed here, which devices there are, and what is wrong",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `posttrain WORD ...` and return the exit code: 2, and a line on stderr, for a mistake.

    Example:
        >>> from posttrain.command import main
        >>> main(["--version"])  # doctest: +ELLIPSIS
        posttrain ...
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in METHODS:
        return run_command(method(words[0]), words[1:], prog=f"posttrain {words[0]}")
    return guarded(lambda: _other(words), "posttrain")


def method(name: str) -> Command:
    """The command of a method.

    Raises:
        CommandError: If there is no such method; the text names the nearest.
    """
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise CommandError(f"there is no method {name!r}{did_you_mean(name, METHODS)} (methods: {known})")
    return load(METHODS[name])


def _other(words: list[str]) -> int:
    first, rest = (words[0], words[1:]) if words else ("--help", [])
    if first in ("-h", "--help", "help"):
        print(_help(), end="", flush=True)
    elif first == "--version":
        from posttrain import __version__

        print(f"posttrain {__version__}", flush=True)
    elif first == "plan":
        return _plan(rest)
    elif first == "env":
        return _env(rest)
    else:
        known = [*METHODS, *OTHERS]
        raise CommandError(f"there is no command {first!r}{did_you_mean(first, known)} (commands: {', '.join(known)})")
    return 0


def _help() -> str:
    lines = ["usage: posttrain METHOD [--config FILE] [--flag value ...]", "", "methods:"]
    lines += [f"  {name:<16}{load(path).summary}" for name, path in METHODS.items()]
    lines += ["", "others:", *(f"  {name:<16}{text}" for name, text in OTHERS.items())]
    lines += ["", "`posttrain METHOD --help` shows the options of a method; `posttrain --version` the version."]
    return "\n".join(lines) + "\n"


def _plan(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: posttrain plan METHOD [the flags of the run]\n\nDescribes the run without running it.", flush=True
        )
        return 0
    command = method(words[0])
    if command.plan is None:
        raise CommandError(f"{words[0]} has no plan")
    parsed = command.parse(words[1:], prog=f"posttrain plan {words[0]}")
    configs = parsed.build()
    return load(command.plan)(*configs, world_size=world_size(launch_options(parsed))) or 0


def _env(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print(
            "usage: posttrain env\n\nShows what is installed here, which devices there are, and what is wrong.",
            flush=True,
        )
        return 0
    if words:
        raise CommandError(f"env takes no arguments, got {words[0]!r}")
    from posttrain.env import report

    text, problems = report()
    print(text, end="", flush=True)
    return 1 if problems else 0

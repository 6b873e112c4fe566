"""The one exception that a command line answers with a line instead of a traceback."""


class CommandError(ValueError):
    """A mistake in a command line or in a configuration file.

    The text is one line that names the flag or the file and key, what was found, and what to write instead.
    `Command.main` prints it to stderr and returns 2; an app may raise it too, for anything the user can put right.

    Example:
        >>> from posttrain_cli import CommandError
        >>> str(CommandError("--learning_rate: expected a number, got 'fast'"))
        "--learning_rate: expected a number, got 'fast'"
    """

"""The one exception that a command line answers with a line instead of a traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(ValueError):
    """A mistake in a command line or in a configuration file.

    The text is one line that names the flag or the file and key, what was found, and what to write instead.
    `Command.main` prints it to stderr and returns 2; an app may raise it too, for anything the user can put right.

    Example:
        >>> from posttrain_cli import CommandError
        >>> str(CommandError("--learning_rate: expected a number, got 'fast'"))
        "--learning_rate: expected a number, got 'fast'"
    """


@contextmanager
def mistakes(*kinds: type[Exception]) -> Iterator[None]:
    """What is wrong with the input, a missing package, or a disk that is full, becomes a `CommandError` of one line.

    Args:
        kinds: The exceptions that a user can put right.

    Raises:
        CommandError: For an exception of these kinds, and for a full disk.

    Example:
        >>> from posttrain_cli import mistakes
        >>> with mistakes(ValueError):
        ...     int("three")
        Traceback (most recent call last):
        posttrain_cli.errors.CommandError: invalid literal for int() with base 10: 'three'
    """
    try:
        yield
    except kinds as error:
        raise CommandError(" ".join(str(error).split())) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CommandError(error.strerror) from error

"""Mistakes of a user become one line."""

import errno

import pytest
from posttrain_cli import CommandError, mistakes


def test_mistakes_become_one_line():
    with pytest.raises(CommandError, match="^rows are missing$"), mistakes(ValueError):
        raise ValueError("rows are\n  missing")
    with pytest.raises(CommandError, match="^No space left$"), mistakes(ValueError):
        raise OSError(errno.ENOSPC, "No space left")
    with mistakes(ValueError):
        pass


def test_what_is_no_mistake_stays_what_it_is():
    with pytest.raises(KeyError), mistakes(ValueError):
        raise KeyError("a bug")
    with pytest.raises(PermissionError), mistakes(ValueError):
        raise PermissionError(errno.EACCES, "no")

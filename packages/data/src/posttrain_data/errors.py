"""The one exception of this package, and nearest names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """A data set, file, template or option that cannot be trained on as it is.

    The message names the data set, row (counted from 0), column, file or line, and what to write instead.

    Example:
        >>> from posttrain_data import DataError, prepare_sft, tiny_tokenizer
        >>> try:
        ...     prepare_sft([{"txt": "hi"}], tiny_tokenizer(), cache_dir=False)
        ... except DataError as error:
        ...     print(str(error)[:52])
        train: row 0: no known format: its columns are 'txt'
    """


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a mistyped one, or None when none is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def names(values: Iterable[object]) -> str:
    """Quoted and separated by commas."""
    return ", ".join(repr(value) for value in values)

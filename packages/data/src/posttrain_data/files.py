"""Local files to rows, with errors that name file and line.

Columns that hold lists, dicts or values of several types become JSON columns, whose text is kept as it was written:
Arrow's own structs add the keys of other rows with the value None, inside tools and arguments too. Preparation parses
that text itself, because the decoder of `datasets.Json` is not exact (it reads 0.7 as 0.7000000000000001).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from posttrain_data.errors import DataError, names
from posttrain_data.rows import RAW

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


def data_files(path: Path) -> list[Path]:
    """The data files in a folder, or the file itself."""
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: unknown kind of file {path.suffix!r}: write one of {names(SUFFIXES)}.")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(f"{path}: the folder holds no data file: it needs one of {names(SUFFIXES)}.")
    return found


def read_files(paths: list[Path], cache_dir: str | None = None) -> datasets.Dataset:
    """All rows of local files, checked from the first to the last, kept on disk and mapped into memory."""
    parquet = [path for path in paths if path.suffix.lower() == ".parquet"]
    if parquet and len(parquet) < len(paths):
        raise DataError(
            f"{parquet[0]} and {next(p for p in paths if p not in parquet)}: read Parquet files on their own."
        )
    if parquet:
        return _parquet(parquet, cache_dir)
    features = _features(paths)
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    try:
        return datasets.Dataset.from_generator(
            _generate,
            features=features,
            cache_dir=cache_dir,  # ty: ignore[invalid-argument-type]
            gen_kwargs={
                "stamps": tuple(stamps),
                "columns": tuple((column, isinstance(feature, datasets.Json)) for column, feature in features.items()),
            },
        )
    except DatasetGenerationError as error:
        raise DataError(f"{paths[0]}: {error.__cause__ or error}") from error


def stream_files(paths: list[Path], columns: Mapping[str, str] | None = None) -> datasets.IterableDataset:
    """The rows of local files, read and checked while they are used; `columns` chooses and renames as `{new: old}`.

    Nested values stream as JSON text, and each row has its exact text in one more column, which preparation reads.
    """
    if any(path.suffix.lower() == ".parquet" for path in paths):
        rows = datasets.load_dataset("parquet", data_files=[str(path) for path in paths], split="train", streaming=True)
        if columns is None:
            return rows
        rows = rows.select_columns(list(dict.fromkeys(columns.values())))
        return rows.rename_columns({old: new for new, old in columns.items() if old != new})
    chosen = None if columns is None else dict(columns)
    return datasets.IterableDataset.from_generator(
        _stream, gen_kwargs={"paths": [str(path) for path in paths], "columns": chosen}
    )


def _generate(
    stamps: tuple[tuple[str, int, int], ...], columns: tuple[tuple[str, bool], ...]
) -> Iterator[dict[str, Any]]:
    for path, _, _ in stamps:
        for _, row in read_rows(Path(path)):
            yield {column: as_json(row.get(column)) if nested else row.get(column) for column, nested in columns}


def _stream(paths: list[str], columns: Mapping[str, str] | None) -> Iterator[dict[str, Any]]:
    for path in paths:
        for _, row in read_rows(Path(path)):
            if columns is not None:
                row = {new: row.get(old) for new, old in columns.items()}
            plain = {key: as_json(value) if isinstance(value, list | dict) else value for key, value in row.items()}
            yield {RAW: json.dumps(row), **plain}


def as_json(value: Any) -> str | None:
    """The JSON text of a value, so that a JSON column keeps it exactly (a bare string would be read as JSON)."""
    return None if value is None else json.dumps(value)


def _features(paths: list[Path]) -> datasets.Features:
    """One pass over all rows: every row is checked, and every column gets the narrowest type that keeps its values."""
    kinds: dict[str, set[type]] = {}
    rows = 0
    for path in paths:
        for _, row in read_rows(path):
            rows += 1
            for column, value in row.items():
                kinds.setdefault(column, set()).add(type(value))
    if not rows:
        raise DataError(f"{paths[0]}: the file holds no row: give at least one.")
    if not kinds:
        raise DataError(f"{paths[0]}: the rows have no column: write at least one, such as 'text' or 'messages'.")
    return datasets.Features({column: _feature(found - {type(None)}) for column, found in kinds.items()})


def _feature(kinds: set[type]) -> Any:
    if kinds <= {str}:
        return datasets.Value("string")
    if kinds == {bool}:
        return datasets.Value("bool")
    if kinds == {int}:
        return datasets.Value("int64")
    if kinds <= {int, float}:
        return datasets.Value("float64")
    return datasets.Json()


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a JSON, JSONL, CSV or TSV file with their line (or place in a JSON array, from 0)."""
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty: give at least one row.")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        yield from _csv_rows(path, "\t" if suffix == ".tsv" else ",")
    elif suffix == ".json" and _first_character(path) == "[":
        yield from _array_rows(path)
    else:
        yield from _line_rows(path)


def _first_character(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return start[:1].decode("latin-1")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not valid UTF-8 (byte {line[error.start]:#04x} at column "
                    f"{error.start + 1}): save the file as UTF-8."
                ) from None
            yield number, text


def _check_surrogates(where: str, source: str, value: Any) -> None:
    if "\\ud" not in source.lower():
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: half of a surrogate pair (\\ud...), which is no character: remove it.") from None


def _line_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    found = False
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            cut = error.pos >= len(line.rstrip()) - 1 or "Unterminated" in error.msg
            reason = "the line ends early; was the file cut off?" if cut else f"{error}."
            if not found and line.strip() in ("{", "["):
                reason = "write one JSON object a line, or a JSON array of objects in a .json file."
            raise DataError(f"{path}, line {number}: not a JSON object: {reason}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: is of type {type(row).__name__}, not an object with columns.")
        _check_surrogates(f"{path}, line {number}", line, row)
        found = True
        yield number, row


def _array_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    text = "".join(line for _, line in _lines(path))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        cut = "; was the file cut off?" if error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg else "."
        raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}{cut}") from None
    _check_surrogates(str(path), text, rows)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}, entry {number}: is of type {type(row).__name__}, not an object with columns.")
        yield number, row


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader((line for _, line in _lines(path)), delimiter=delimiter, strict=True)
    csv.field_size_limit(2**31 - 1)
    header: list[str] | None = None
    try:
        for values in reader:
            if not values:
                continue
            if header is None:
                header = values
                twice = next((column for column in header if header.count(column) > 1), None)
                if twice is not None:
                    raise DataError(f"{path}, line {reader.line_num}: column {twice!r} is there twice: rename one.")
                continue
            if len(values) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(values)} fields, the header has {len(header)} "
                    f"({names(header)}): quote fields that hold a separator or a line end."
                )
            yield reader.line_num, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}.") from None


def _parquet(paths: list[Path], cache_dir: str | None) -> datasets.Dataset:
    for path in paths:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(max(0, path.stat().st_size - 4))
            if start != b"PAR1" or file.read(4) != b"PAR1" or path.stat().st_size < 12:
                raise DataError(f"{path}: not a whole Parquet file; was it cut off?")
    try:
        return datasets.Dataset.from_parquet(
            [str(path) for path in paths],
            cache_dir=cache_dir,  # ty: ignore[invalid-argument-type]
        )
    except (DatasetGenerationError, OSError, ValueError) as error:
        raise DataError(f"{paths[0]}: {error.__cause__ or error}") from error

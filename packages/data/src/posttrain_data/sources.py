"""Rows from files, folders, the hub, and mixtures of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from posttrain_data.errors import DataError, names, nearest
from posttrain_data.files import SUFFIXES, as_json, data_files, read_files, stream_files
from posttrain_data.rows import RAW


@dataclass(frozen=True)
class DatasetSpec:
    """One source of rows.

    Attributes:
        path: A file (.json, .jsonl, .csv, .tsv, .parquet), a folder of such files or one that `save_to_disk` wrote, or
            the name of a data set on the hub.
        name: The configuration of a hub data set.
        split: The split of a hub data set or saved folder, slices such as "train[:1000]" included.
        data_files: Files within a hub data set or a local folder.
        data_dir: Folder within a hub data set.
        columns: Columns to keep; a dict `{"new": "old"}` renames them on the way. None keeps all.
        weight: The share of this source in a mixture, relative to the others' weights. None in every source: all rows
            of all sources, one source after the other.
        fraction: The share of this source's rows to use, from 0 to 1, spread evenly over it.

    Example:
        >>> from posttrain_data import DatasetSpec
        >>> DatasetSpec("rows.jsonl", weight=2).split
        'train'
    """

    path: str
    name: str | None = None
    split: str = "train"
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None
    data_dir: str | None = None
    columns: Sequence[str] | Mapping[str, str] | None = None
    weight: float | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("weight", self.weight), ("fraction", self.fraction)):
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise DataError(f"data set {self.path!r}: {name}={value!r}: write a number.")
        if self.weight is not None and not self.weight > 0:
            raise DataError(f"data set {self.path!r}: weight={self.weight}: write a number above 0.")
        if not 0 < self.fraction <= 1:
            raise DataError(f"data set {self.path!r}: fraction={self.fraction}: write a number above 0, at most 1.")


def load_rows(
    spec: str | Path | DatasetSpec | Sequence[str | Path | DatasetSpec],
    *,
    streaming: bool = False,
    test_split_size: int | float | None = None,
    seed: int = 42,
    cache_dir: str | None = None,
) -> tuple[Any, Any]:
    """Reads rows from one source or a mixture.

    Sources with weights are interleaved so that after every row each has had its share, to within one row, and the
    mixture ends where the first of them does: no row comes twice. Nested values come back exactly as they were written.

    Args:
        spec: A path, a hub name, a `DatasetSpec`, or a list of them.
        streaming: Read rows while they are used.
        test_split_size: Rows (int) or share (float below 1) to hold out, drawn with `seed`; the first of a stream.
        seed: For drawing the held-out rows and for the order of a streamed mixture.
        cache_dir: Where `datasets` keeps what it reads; None is its own default.

    Returns:
        The rows and the held-out rows (None without `test_split_size`): `datasets.Dataset`s, or `IterableDataset`s.

    Raises:
        DataError: Naming file and line for damaged files; for empty sources, unknown columns and wrong weights.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from posttrain_data import load_rows
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "rows.jsonl").write_text('{"text": "one"}\\n{"text": "two"}\\n')
        >>> rows, held_out = load_rows(folder / "rows.jsonl", cache_dir=str(folder / "cache"))
        >>> rows["text"][:], held_out
        (['one', 'two'], None)
    """
    listed = [spec] if isinstance(spec, str | Path | DatasetSpec) else list(spec)
    if not listed:
        raise DataError("no data set is named: give at least one path or name.")
    specs = [one if isinstance(one, DatasetSpec) else DatasetSpec(str(one)) for one in listed]
    weighted = [one.weight is not None for one in specs]
    if any(weighted) and not all(weighted):
        raise DataError(
            f"data set {specs[weighted.index(False)].path!r} has no weight, others have: give all a weight."
        )
    sources = [_fraction(_load(one, streaming, cache_dir), one) for one in specs]
    weights = [float(one.weight) for one in specs if one.weight is not None]
    mixed = sources[0] if len(sources) == 1 else _mix(sources, weights, seed)
    return _hold_out(mixed, test_split_size, seed)


def _load(spec: DatasetSpec, streaming: bool, cache_dir: str | None) -> Any:
    path = Path(spec.path).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _columns(_saved(path, spec, streaming), spec)
    if path.exists():
        files = _chosen_files(path, spec) if spec.data_files else data_files(path)
        if not streaming:
            return _columns(_slice(read_files(files, cache_dir), spec), spec)
        _check_columns(next(iter(stream_files(files))), spec)
        return stream_files(files, None if spec.columns is None else _wanted(spec))
    if path.suffix.lower() in SUFFIXES or spec.path.startswith((".", "/", "~")):
        raise DataError(f"{spec.path}: no such file or folder.")
    try:
        found = datasets.load_dataset(
            spec.path,
            spec.name,
            split=spec.split,
            data_files=spec.data_files,
            data_dir=spec.data_dir,
            streaming=streaming,
            cache_dir=cache_dir,
        )
    except Exception as error:  # the hub client has many kinds of failure; each means this source cannot be read
        raise DataError(
            f"data set {spec.path!r} (split {spec.split!r}) is no local file or folder, and cannot be read from the "
            f"hub: {type(error).__name__}: {error}"
        ) from error
    return _columns(found, spec)


def _slice(rows: Any, spec: DatasetSpec) -> Any:
    """`split="train[:100]"` of local files, whose only split is "train"."""
    if "[" not in spec.split:
        return rows
    instruction = datasets.ReadInstruction.from_spec("train" + spec.split[spec.split.index("[") :])
    (part,) = instruction.to_absolute({"train": len(rows)})
    return rows.select(range(part.from_ or 0, len(rows) if part.to is None else part.to))


def _chosen_files(path: Path, spec: DatasetSpec) -> list[Path]:
    given = spec.data_files
    if isinstance(given, Mapping):
        given = given.get(spec.split.partition("[")[0]) or []
    patterns = [given] if isinstance(given, str) else list(given or [])
    found = [file for pattern in patterns for file in sorted(path.glob(pattern))]
    if not found:
        raise DataError(f"{path}: no file matches data_files={spec.data_files!r}.")
    return [file for one in found for file in data_files(one)]


def _saved(path: Path, spec: DatasetSpec, streaming: bool) -> Any:
    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: this saved data set cannot be read: {error}") from error
    if isinstance(rows, datasets.DatasetDict):
        split = spec.split.partition("[")[0]
        if split not in rows:
            raise DataError(f"{path}: no split {split!r}: it holds {names(rows)}.")
        rows = rows[split]
    rows = _slice(rows, spec)
    return rows.to_iterable_dataset() if streaming else rows


def _wanted(spec: DatasetSpec) -> dict[str, str]:
    columns = spec.columns or ()
    return dict(columns) if isinstance(columns, Mapping) else {column: column for column in columns}


def _check_columns(known: Iterable[str], spec: DatasetSpec) -> None:
    known = [column for column in known if column != RAW]
    for old in _wanted(spec).values():
        if old not in known:
            close = nearest(old, known)
            hint = f"; did you mean {close!r}?" if close else ""
            raise DataError(f"data set {spec.path!r} has no column {old!r}, only {names(known)}{hint}")


def _columns(rows: Any, spec: DatasetSpec) -> Any:
    if spec.columns is None:
        return rows
    _check_columns(rows.column_names or next(iter(rows)), spec)
    wanted = _wanted(spec)
    rows = rows.select_columns(list(dict.fromkeys(wanted.values())))
    return rows.rename_columns({old: new for new, old in wanted.items() if old != new})


def _fraction(rows: Any, spec: DatasetSpec) -> Any:
    if isinstance(rows, datasets.IterableDataset):
        if spec.fraction != 1:
            raise DataError(
                f"data set {spec.path!r}: a stream has no length to take a fraction of: use weight, or a slice."
            )
        return rows
    if not len(rows):
        raise DataError(f"data set {spec.path!r} (split {spec.split!r}) is empty.")
    if spec.fraction == 1:
        return rows
    count = max(1, round(len(rows) * spec.fraction))
    return rows.select(np.arange(count) * len(rows) // count)


# Mixtures


def _mix(sources: list[Any], weights: list[float], seed: int) -> Any:
    if isinstance(sources[0], datasets.IterableDataset):
        if not weights:
            return datasets.concatenate_datasets(sources)
        shares = [weight / sum(weights) for weight in weights]
        return datasets.interleave_datasets(
            sources, probabilities=shares, seed=seed, stopping_strategy="first_exhausted"
        )
    joined = datasets.concatenate_datasets(_aligned(sources))
    if not weights:
        return joined
    lengths = [len(source) for source in sources]
    starts = np.cumsum([0, *lengths[:-1]])
    order = interleaved(lengths, weights)
    return joined.select([int(starts[source]) + row for source, row in order])


def interleaved(lengths: Sequence[int], weights: Sequence[float]) -> list[tuple[int, int]]:
    """`(source, row)` so that each source keeps to its share at every length, until the first one is used up."""
    exact = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    total = sum(exact)
    taken = [0] * len(lengths)
    order: list[tuple[int, int]] = []
    while True:
        step = len(order) + 1
        behind = [share / total * step - count for share, count in zip(exact, taken, strict=True)]
        source = max(range(len(lengths)), key=lambda index: (behind[index], -index))
        if taken[source] == lengths[source]:
            return order
        order.append((source, taken[source]))
        taken[source] += 1


def _aligned(sources: list[datasets.Dataset]) -> list[datasets.Dataset]:
    """Columns of one name but different types become JSON, so that rows of different formats can stand together."""
    kinds: dict[str, list[Any]] = {}
    for source in sources:
        for column, feature in source.features.items():
            kinds.setdefault(column, []).append(feature)
    clash = {
        column
        for column, found in kinds.items()
        if any(feature != found[0] for feature in found) and not all(_is_text(feature) for feature in found)
    }
    return [_as_json(source, clash & set(source.column_names)) for source in sources]


def _is_text(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _as_json(source: datasets.Dataset, columns: set[str]) -> datasets.Dataset:
    from posttrain_data.formats import strip_none

    ready = {column for column, feature in source.features.items() if isinstance(feature, datasets.Json)}
    columns = columns - ready
    if not columns:
        return source
    for column in ready:  # as text, so that map does not decode and encode them
        source = source.cast_column(column, datasets.Json(decode=False))
    features = {**source.features, **{column: datasets.Json(decode=False) for column in columns}}
    source = source.map(
        lambda row: {column: as_json(strip_none(row[column])) for column in columns},
        features=datasets.Features(features),
        desc="Aligning columns",
    )
    for column in ready | columns:
        source = source.cast_column(column, datasets.Json())
    return source


def _hold_out(rows: Any, size: int | float | None, seed: int) -> tuple[Any, Any]:
    if size is None:
        return rows, None
    if isinstance(rows, datasets.IterableDataset):
        if not isinstance(size, int) or size < 1:
            raise DataError(f"test_split_size={size}: a stream has no length: write a number of rows.")
        return rows.skip(size), rows.take(size)
    count = size if isinstance(size, int) and size >= 1 else round(len(rows) * size)
    if not 0 < count < len(rows):
        raise DataError(f"test_split_size={size}: write a number of rows, or a share, that leaves some of {len(rows)}.")
    parts = rows.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]

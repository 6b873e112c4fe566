"""The one pipeline of all preparations: raw rows to prepared rows; parallel, cached, or streamed."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import datasets.config
from datasets.fingerprint import Hasher

from posttrain_data.cache import digest, once, tokenizer_digest
from posttrain_data.errors import DataError, names
from posttrain_data.keys import describe_unread
from posttrain_data.options import TOO_LONG, Prepared, Report
from posttrain_data.packing import pack_rows, pack_table, quiet
from posttrain_data.rows import RAW, Row, RowMaker

BATCH = 256
STREAM_CHECK = 1000  # rows of a stream after which having no usable one is an error
STREAM_FIRST = 8  # rows of a stream that are tried before training


def prepare(maker: RowMaker, dataset: Any, cache_dir: str | Path | bool | None) -> Prepared:
    """Prepares all rows with `maker`: from the cache, or made and kept there; a stream while it is read.

    Raises:
        DataError: For the first row that cannot be used, an empty data set, and when no row is left.
    """
    name = maker.name
    _check_type(dataset, name)
    if isinstance(dataset, datasets.IterableDataset):
        return _Stream(maker).prepared(dataset)
    if not len(dataset):
        raise DataError(f"{name}: the data set is empty: give at least one row.")
    if cache_dir is False:
        return _prepare(maker, dataset, None)
    root = Path(datasets.config.HF_DATASETS_CACHE) / "posttrain" if cache_dir in (None, True) else Path(str(cache_dir))

    def make(folder: Path) -> None:
        prepared = _prepare(maker, dataset, folder)
        with quiet():
            prepared.dataset.save_to_disk(folder / "rows")
        (folder / "report.json").write_text(json.dumps(asdict(prepared.report)))
        for scratch in folder.glob("scratch*"):
            scratch.unlink()

    def load(folder: Path) -> Prepared:
        try:
            report: dict[str, Any] = json.loads((folder / "report.json").read_text())
            return Prepared(datasets.load_from_disk(folder / "rows"), replace(Report(**report), name=name))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"the prepared rows in {folder} are damaged ({error}): remove that folder.") from error

    return once(root / f"{maker.kind}-{_key(maker, dataset)}", make, load)


def _check_type(dataset: Any, name: str) -> None:
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict | dict):
        raise DataError(f"{name}: this holds the splits {names(dataset)}: choose one, such as dataset['train'].")
    if isinstance(dataset, datasets.Dataset):
        if dataset._format_type == "custom":
            raise DataError(f"{name}: with_transform and set_transform are not supported: use dataset.map instead.")
        return
    if isinstance(dataset, datasets.IterableDataset):
        return
    if not isinstance(dataset, list | tuple):
        raise DataError(
            f"{name}: cannot read a value of type {type(dataset).__name__}: give a datasets.Dataset or a list of dicts."
        )
    wrong = next((n for n, row in enumerate(dataset) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise DataError(f"{name}: row {wrong} is of type {type(dataset[wrong]).__name__}: write a dict of columns.")


def _key(maker: RowMaker, dataset: Any) -> str:
    if isinstance(dataset, datasets.Dataset):
        rows = dataset._fingerprint
    else:
        rows = digest(*(json.dumps(row, default=_plain).encode() for row in dataset))
    shaping = {f.name: getattr(maker.options, f.name) for f in fields(maker.options) if f.name != "num_proc"}
    functions = {key: Hasher.hash(shaping.pop(key)) for key in list(shaping) if callable(shaping[key])}
    today = date.today().isoformat() if "strftime_now" in repr(maker.renderer.templates) else None
    packages = ("posttrain-data", "posttrain-collators", "transformers", "tokenizers")
    versions = [version(package) for package in packages]
    return digest(rows, tokenizer_digest(maker.source), shaping, functions, today, versions, _own_code())


@functools.cache
def _own_code() -> list[str]:
    """This package's own source, which says more than its version while it is being worked on."""
    return [digest(file.read_bytes()) for file in sorted(Path(__file__).parent.glob("*.py"))]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"a row holds an object of type {type(value).__name__}, which cannot be stored: write plain Python values."
    )


# What happened to rows


class _Tally:
    """Adds up what happened to rows."""

    def __init__(self, maker: RowMaker) -> None:
        self.maker = maker
        self.report = Report(maker.name)
        self.unread: dict[str, int] = {}
        self.read: set[str] = set()
        self.notes: Counter[str] = Counter()
        self.having: dict[str, int] = {}
        """The first row that has each optional column."""
        self.lacking: dict[str, int] = {}
        """The first row that has it not."""

    def add(self, row: Row, index: int) -> None:
        self.add_about(_about(row), index)

    def add_about(self, about: list[Any], index: int) -> None:
        dropped, tokens, targets, cut, given, unread, read, notes = about
        report = self.report
        report.rows_in += 1
        for key in unread:
            self.unread.setdefault(key, index)
        self.read.update(read)
        self.notes.update(notes)
        if dropped:
            report.dropped[dropped] = report.dropped.get(dropped, 0) + 1
            return
        report.rows_kept += 1
        report.tokens += tokens
        report.target_tokens += targets
        report.cut_tokens += cut
        report.truncated_rows += bool(cut)
        for column in self.maker.optional:
            (self.having if column in given else self.lacking).setdefault(column, index)
            if column in self.having and column in self.lacking:
                raise DataError(
                    f"{report.name}: row {self.lacking[column]} has no {column!r}, row {self.having[column]} has one: "
                    "give it to all rows, or to none."
                )

    def finish(self) -> None:
        notes = [f"{text} ({count:,} rows)" for text, count in self.notes.items()]
        unread = {key: row for key, row in self.unread.items() if key not in self.read}
        self.report.notes = notes + (describe_unread(unread, self.maker.renderer) if unread else [])

    def why(self) -> str:
        dropped = self.report.dropped
        reasons = ", ".join(f"{count:,} rows with {reason}" for reason, count in dropped.items())
        if TOO_LONG & set(dropped):
            return f"{reasons}. Raise max_length."
        return f"{reasons}. {self.maker.question}"


def _about(row: Row) -> list[Any]:
    lists = [sorted(row.columns), sorted(row.unread), sorted(row.read), sorted(row.notes)]
    return [row.dropped, row.tokens, row.targets, row.cut, *lists]


def _raw_rows(batch: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _raw_json(dataset: Any) -> tuple[Any, frozenset[str]]:
    """The data set with its JSON columns as text, and their names."""
    features = dataset.features or {}
    columns = [column for column, feature in features.items() if isinstance(feature, datasets.Json)]
    for column in columns:
        dataset = dataset.cast_column(column, datasets.Json(decode=False))
    return dataset, frozenset(columns)


# Map-style


class _Mapped:
    """`Dataset.map`'s function: a batch of columns to a batch of columns, dropped rows left empty."""

    def __init__(self, maker: RowMaker) -> None:
        self.maker = maker

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        made = self.maker(_raw_rows(batch), indices)
        flat = [(row, index) for rows, index in zip(made, indices, strict=True) for row in rows]
        columns = {key: [row.columns.get(key) for row, _ in flat] for key in self.maker.features}
        return {**columns, "about": [json.dumps([index, *_about(row)]) for row, index in flat]}


def _prepare(maker: RowMaker, dataset: Any, scratch: Path | None) -> Prepared:
    if not isinstance(dataset, datasets.Dataset):
        dataset = datasets.Dataset.from_dict({RAW: [json.dumps(row, default=_plain) for row in dataset]})
    dataset, maker.exact = _raw_json(dataset.with_format(None))
    num_proc = maker.options.num_proc
    mapped = dataset.map(
        _Mapped(maker),
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=datasets.Features({**maker.features, "about": datasets.Value("string")}),
        num_proc=min(num_proc, len(dataset)) if num_proc else None,
        cache_file_name=str(scratch / "scratch.arrow") if scratch else None,
        keep_in_memory=scratch is None,
        load_from_cache_file=False,
        new_fingerprint=digest(maker.name),
        desc=f"Preparing {maker.name}",
    )
    tally = _Tally(maker)
    kept: list[int] = []
    for place, about in enumerate(mapped.with_format("arrow")["about"][:].to_pylist()):
        index, *parts = json.loads(about)
        tally.add_about(parts, index)
        if not parts[0]:
            kept.append(place)
    tally.finish()
    report = tally.report
    if not kept:
        raise DataError(f"{report.name}: no row has a {maker.lacking}, so there is nothing to train: {tally.why()}")
    if len(kept) < len(mapped):
        mapped = mapped.select(kept)
    mapped = mapped.remove_columns(["about", *tally.lacking])
    if maker.packing and "seq_lengths" not in tally.having:
        mapped = pack_table(mapped, maker.packing, maker.features, report, scratch)
    return Prepared(mapped, report)


# Streams


class _Stream:
    """Prepares a stream as it is read; its counters grow in the process that reads."""

    def __init__(self, maker: RowMaker) -> None:
        self.maker = maker
        self.tally = _Tally(maker)
        self.report = self.tally.report
        if maker.packing:
            self.report.packed_rows, self.report.capacity = 0, maker.packing.capacity

    def prepared(self, dataset: Any) -> Prepared:
        maker = self.maker
        dataset, maker.exact = _raw_json(dataset)
        first = list(islice(iter(dataset), STREAM_FIRST))
        if not first:
            raise DataError(f"{self.report.name}: the data set is empty: give at least one row.")
        tried = _Tally(maker)
        for index, rows in enumerate(maker(first, range(len(first)))):
            for row in rows:
                tried.add(row, index)
        missing = dict.fromkeys(set(maker.optional) - set(tried.having), 0)
        self.tally.having, self.tally.lacking = tried.having, {**missing, **tried.lacking}
        self.packing = None if "seq_lengths" in tried.having else maker.packing
        self.keys = [key for key in maker.features if key not in maker.optional or key in tried.having or self.packing]
        mapped = dataset.map(
            self._batch,
            batched=True,
            batch_size=STREAM_CHECK if self.packing else BATCH,
            with_indices=True,
            remove_columns=list(dataset.column_names or dict.fromkeys(key for row in first for key in row)),
            features=datasets.Features({key: maker.features[key] for key in self.keys}),
        )
        return Prepared(mapped, self.report)

    def _batch(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        kept = []
        for rows, index in zip(self.maker(_raw_rows(batch), indices), indices, strict=True):
            for row in rows:
                self.tally.add(row, index)
            kept += [row.columns for row in rows if not row.dropped]
        report = self.report
        if not report.rows_kept and report.rows_in >= STREAM_CHECK:
            raise DataError(
                f"{report.name}: none of the first {report.rows_in:,} rows has a {self.maker.lacking}: "
                f"{self.tally.why()}"
            )
        self.tally.finish()
        if self.packing:
            return pack_rows(kept, self.packing, report)
        return {key: [row[key] for row in kept] for key in self.keys}

"""Raw rows to prepared rows: recognise, render, tokenise, mask, cut, drop, pack; parallel, cached, or streamed."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import datasets.config
import numpy as np
from datasets.fingerprint import Hasher
from posttrain_collators import pack

from posttrain_data.cache import digest, once, tokenizer_digest
from posttrain_data.errors import DataError, names
from posttrain_data.keys import describe_unread
from posttrain_data.options import ALL_CUT, Prepared, Report, SFTDataOptions
from posttrain_data.rendering import Renderer
from posttrain_data.rows import RAW, Row, RowMaker

BATCH = 256
STREAM_CHECK = 1000  # rows of a stream after which having no target at all is an error
STREAM_FIRST = 8  # rows of a stream that are tried before training
OVERLONG: dict[str, Literal["truncate", "split", "wrap"]] = {"bfd": "truncate", "bfd_split": "split", "wrapped": "wrap"}
FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "seq_lengths": datasets.List(datasets.Value("int32")),
        "about": datasets.Value("string"),
    }
)


def prepare_sft(
    dataset: Any,
    tokenizer: Any,
    options: SFTDataOptions | None = None,
    cache_dir: str | Path | bool | None = None,
    name: str = "train",
) -> Prepared:
    """Prepares rows for supervised fine-tuning.

    A row is recognised by its columns: `text`; `messages` or `conversations` (`role`/`content` or `from`/`value`);
    `prompt` and `completion` (two strings or two lists of messages); `instruction`, `input`, `output`; the `chosen`
    side of a preference row; `input_ids` with `labels`, `completion_mask`, `assistant_masks` or `loss_mask`.

    A target is a token that a sampler would have generated: what the generation prompt writes is none, the tokens that
    end an assistant turn are. Plain text and completions get `eos_token` unless they end with it. Each token of which
    any character was generated counts as a target. Rows without a target are dropped and counted.

    Results are kept on disk under a key made of the rows, the tokenizer, its template, the options and the versions of
    the packages. When several processes ask for the same rows one prepares them and the others wait for its files.

    Args:
        dataset: `datasets.Dataset`, `datasets.IterableDataset`, or a list of dicts.
        tokenizer: A tokenizer, or a processor that holds one.
        options: How; the defaults of `SFTDataOptions` when None.
        cache_dir: Folder for prepared rows; None is `posttrain` in the cache of `datasets`, False keeps them in memory.
        name: Name of the data set in messages.

    Returns:
        The prepared rows, and the report. A stream is prepared while it is read.

    Raises:
        DataError: For the first row that cannot be used, naming data set, row and column; an empty data set; no target
            in any row.

    Example:
        >>> from posttrain_data import SFTDataOptions, prepare_sft, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> rows = [{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}]
        >>> prepared = prepare_sft(rows, tokenizer, SFTDataOptions(assistant_only=True), cache_dir=False)
        >>> row = prepared.dataset[0]
        >>> tokenizer.decode([token for token, target in zip(row["input_ids"], row["loss_mask"]) if target])
        '4<|im_end|>'
    """
    options = options or SFTDataOptions()
    _check_type(dataset, name)
    if isinstance(dataset, datasets.IterableDataset):
        return _Stream(tokenizer, options, name).prepared(dataset)
    if not len(dataset):
        raise DataError(f"{name}: the data set is empty: give at least one row.")
    if cache_dir is False:
        return _prepare(dataset, tokenizer, options, name, None)
    root = Path(datasets.config.HF_DATASETS_CACHE) / "posttrain" if cache_dir in (None, True) else Path(str(cache_dir))

    def make(folder: Path) -> None:
        prepared = _prepare(dataset, tokenizer, options, name, folder)
        with _quiet():
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

    return once(root / f"sft-{_key(dataset, tokenizer, options)}", make, load)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """No progress bars for copies that take a moment."""
    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.utils.enable_progress_bars()


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
        raise DataError(f"{name}: cannot read a {type(dataset).__name__}: give a datasets.Dataset or a list of dicts.")
    wrong = next((n for n, row in enumerate(dataset) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise DataError(f"{name}: row {wrong} is a {type(dataset[wrong]).__name__}: write a dict of columns.")


def _key(dataset: Any, tokenizer: Any, options: SFTDataOptions) -> str:
    if isinstance(dataset, datasets.Dataset):
        rows = dataset._fingerprint
    else:
        rows = digest(*(json.dumps(row, default=_plain).encode() for row in dataset))
    shaping = {
        f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("num_proc", "formatting_func")
    }
    function = Hasher.hash(options.formatting_func) if options.formatting_func else None
    today = date.today().isoformat() if "strftime_now" in repr(Renderer(tokenizer).templates) else None
    packages = ("posttrain-data", "posttrain-collators", "transformers", "tokenizers")
    versions = [version(package) for package in packages]
    return digest(rows, tokenizer_digest(tokenizer), shaping, function, today, versions, _own_code())


@functools.cache
def _own_code() -> list[str]:
    """This package's own source, which says more than its version while it is being worked on."""
    return [digest(file.read_bytes()) for file in sorted(Path(__file__).parent.glob("*.py"))]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(f"a row holds a {type(value).__name__}, which cannot be stored: write plain Python values.")


# Map-style


class _Tally:
    """Adds up what happened to rows."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.unread: dict[str, int] = {}
        self.read: set[str] = set()
        self.notes: Counter[str] = Counter()

    def add(self, about: Sequence[Any], index: int) -> None:
        dropped, length, targets, cut, unread, read, notes = about
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
        report.tokens += length
        report.target_tokens += targets
        report.cut_tokens += cut
        report.truncated_rows += bool(cut)

    def finish(self, renderer: Renderer) -> None:
        notes = [f"{text} ({count:,} rows)" for text, count in self.notes.items()]
        unread = {key: row for key, row in self.unread.items() if key not in self.read}
        self.report.notes = notes + (describe_unread(unread, renderer) if unread else [])


def _about(row: Row) -> list[Any]:
    lists = [sorted(row.unread), sorted(row.read), sorted(row.notes)]
    return [row.dropped, len(row.input_ids), sum(row.loss_mask), row.cut, *lists]


class _Mapped:
    """`Dataset.map`'s function: a batch of columns to a batch of columns, dropped rows left empty."""

    def __init__(self, maker: RowMaker) -> None:
        self.maker = maker

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        columns = list(batch)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        made = self.maker(rows, indices)
        return {
            "input_ids": [row.input_ids for row in made],
            "loss_mask": [row.loss_mask for row in made],
            "seq_lengths": [row.seq_lengths for row in made],
            "about": [json.dumps(_about(row)) for row in made],
        }


def _raw_json(dataset: Any) -> tuple[Any, frozenset[str]]:
    """The data set with its JSON columns as text, and their names."""
    features = dataset.features or {}
    columns = [column for column, feature in features.items() if isinstance(feature, datasets.Json)]
    for column in columns:
        dataset = dataset.cast_column(column, datasets.Json(decode=False))
    return dataset, frozenset(columns)


def _prepare(dataset: Any, tokenizer: Any, options: SFTDataOptions, name: str, scratch: Path | None) -> Prepared:
    cut = not options.packing or options.packing_strategy == "bfd"
    if not isinstance(dataset, datasets.Dataset):
        dataset = datasets.Dataset.from_dict({RAW: [json.dumps(row, default=_plain) for row in dataset]})
    dataset, exact = _raw_json(dataset.with_format(None))
    maker = RowMaker(tokenizer, options, name, exact, cut)
    mapped = dataset.map(
        _Mapped(maker),
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=FEATURES,
        num_proc=min(options.num_proc, len(dataset)) if options.num_proc else None,
        cache_file_name=str(scratch / "scratch.arrow") if scratch else None,
        keep_in_memory=scratch is None,
        load_from_cache_file=False,
        new_fingerprint=digest(name),
        desc=f"Preparing {name}",
    )
    tally = _Tally(Report(name))
    kept: list[int] = []
    for index, about in enumerate(mapped.with_format("arrow")["about"][:].to_pylist()):
        parts = json.loads(about)
        tally.add(parts, index)
        if not parts[0]:
            kept.append(index)
    tally.finish(maker.renderer)
    report = tally.report
    if not kept:
        raise DataError(f"{name}: no row has a target token, so there is nothing to train: {_why(report)}")
    if len(kept) < len(mapped):
        mapped = mapped.select(kept)
    lengths = any(value is not None for value in mapped[:1]["seq_lengths"])
    mapped = mapped.remove_columns(["about"] if lengths else ["about", "seq_lengths"])
    if options.packing and not lengths:
        mapped = _packed(mapped, options, report, scratch)
    return Prepared(mapped, report)


def _why(report: Report) -> str:
    reasons = ", ".join(f"{count:,} rows with {reason}" for reason, count in report.dropped.items())
    if ALL_CUT in report.dropped:
        return f"{reasons}. Raise max_length."
    return f"{reasons}. Are the completions or the assistant turns empty?"


def _packed(rows: Any, options: SFTDataOptions, report: Report, scratch: Path | None) -> Any:
    assert options.max_length is not None
    with _quiet():
        table = rows.flatten_indices(keep_in_memory=True) if rows._indices is not None else rows
    lengths = np.concatenate(
        [np.asarray(chunk.value_lengths()) for chunk in table.data.column("input_ids").chunks]
    ).astype(np.int64)
    packing = pack(lengths.tolist(), options.max_length, overlong=OVERLONG[options.packing_strategy])
    source = _Columns(table)
    starts = source.starts()
    generated = datasets.Dataset.from_list if scratch is None else None
    features = datasets.Features({key: FEATURES[key] for key in ("input_ids", "loss_mask", "seq_lengths")})
    report.cut_tokens += packing.cut
    report.packed_rows, report.capacity, report.tokens, report.target_tokens = 0, options.max_length, 0, 0
    empty = 0

    def bins() -> Iterator[dict[str, Any]]:
        nonlocal empty
        for pieces in packing.bins:
            row = _join(source, starts, pieces)
            targets = int(row["loss_mask"].sum())
            if not targets:
                empty += 1
                continue
            report.packed_rows = (report.packed_rows or 0) + 1
            report.tokens += len(row["input_ids"])
            report.target_tokens += targets
            yield row

    if generated is not None:
        packed = generated([{key: value.tolist() for key, value in row.items()} for row in bins()], features=features)
    else:
        packed = _write(bins(), features, scratch)  # ty: ignore[invalid-argument-type]
    if empty:
        report.notes.append(f"{empty:,} packed rows hold pieces of rows without a target, and are left out")
    return packed


class _Columns:
    """Row access to the two list columns without Python lists."""

    def __init__(self, table: Any) -> None:
        self.ids = self._flat(table.data.column("input_ids"))
        self.mask = self._flat(table.data.column("loss_mask"))

    @staticmethod
    def _flat(column: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.asarray(chunk.offsets), chunk.values.to_numpy(zero_copy_only=False)) for chunk in column.chunks]

    def starts(self) -> np.ndarray:
        return np.cumsum([0] + [len(offsets) - 1 for offsets, _ in self.ids])

    def piece(self, column: list[tuple[np.ndarray, np.ndarray]], chunk: int, row: int, start: int, stop: int) -> Any:
        offsets, values = column[chunk]
        at = int(offsets[row])
        return values[at + start : at + stop]


def _join(source: _Columns, starts: np.ndarray, pieces: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    ids, masks = [], []
    for row, start, stop in pieces:
        chunk = int(np.searchsorted(starts, row, side="right")) - 1
        local = row - int(starts[chunk])
        ids.append(source.piece(source.ids, chunk, local, start, stop))
        mask = source.piece(source.mask, chunk, local, start, stop).copy()
        mask[0] = False
        masks.append(mask)
    lengths = np.array([stop - start for _, start, stop in pieces], dtype=np.int32)
    return {"input_ids": np.concatenate(ids), "loss_mask": np.concatenate(masks), "seq_lengths": lengths}


def _write(rows: Iterator[dict[str, Any]], features: datasets.Features, folder: Path) -> Any:
    from datasets.arrow_writer import ArrowWriter

    path = str(folder / "scratch-packed.arrow")
    with ArrowWriter(features=features, path=path) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return datasets.Dataset.from_file(path)


# Streams


class _Stream:
    """Prepares a stream as it is read; its counters grow in the process that reads."""

    def __init__(self, tokenizer: Any, options: SFTDataOptions, name: str) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.report = Report(name)
        self.tally = _Tally(self.report)
        if options.packing:
            self.report.packed_rows, self.report.capacity = 0, options.max_length

    def prepared(self, dataset: Any) -> Prepared:
        dataset, exact = _raw_json(dataset)
        first = list(islice(iter(dataset), STREAM_FIRST))
        if not first:
            raise DataError(f"{self.report.name}: the data set is empty: give at least one row.")
        cut = not self.options.packing or self.options.packing_strategy == "bfd"
        self.maker = RowMaker(self.tokenizer, self.options, self.report.name, exact, cut)
        self.maker(first, range(len(first)))
        ready = any(row.get("seq_lengths") for row in first)
        self.packed = self.options.packing and not ready
        lengths = ("seq_lengths",) if ready or self.packed else ()
        self.keys = ("input_ids", "loss_mask", *lengths)
        mapped = dataset.map(
            self._batch,
            batched=True,
            batch_size=STREAM_CHECK if self.packed else BATCH,
            with_indices=True,
            remove_columns=list(dataset.column_names or dict.fromkeys(key for row in first for key in row)),
            features=datasets.Features({key: FEATURES[key] for key in self.keys}),
        )
        return Prepared(mapped, self.report)

    def _batch(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        made = self.maker(rows, indices)
        for row, index in zip(made, indices, strict=True):
            self.tally.add(_about(row), index)
        report = self.report
        if not report.rows_kept and report.rows_in >= STREAM_CHECK:
            raise DataError(
                f"{report.name}: none of the first {report.rows_in:,} rows has a target token: {_why(report)}"
            )
        self.tally.finish(self.maker.renderer)
        kept = [row for row in made if not row.dropped]
        if self.packed:
            return self._pack(kept)
        return {key: [getattr(row, key) for row in kept] for key in self.keys}

    def _pack(self, kept: list[Row]) -> dict[str, list[Any]]:
        assert self.options.max_length is not None
        lengths = [len(row.input_ids) for row in kept]
        packing = pack(lengths, self.options.max_length, overlong=OVERLONG[self.options.packing_strategy])
        made: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_lengths": []}
        for pieces in packing.bins:
            if not any(any(kept[row].loss_mask[start + 1 : stop]) for row, start, stop in pieces):
                continue
            made["input_ids"].append([t for row, start, stop in pieces for t in kept[row].input_ids[start:stop]])
            masks = [[False, *kept[row].loss_mask[start + 1 : stop]] for row, start, stop in pieces]
            made["loss_mask"].append([target for mask in masks for target in mask])
            made["seq_lengths"].append([stop - start for _, start, stop in pieces])
        assert self.report.packed_rows is not None
        self.report.packed_rows += len(made["input_ids"])
        return made

"""Several prepared sequences in one row, for tables and for streams."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
from posttrain_collators import pack

from posttrain_data.options import Report

OVERLONG: dict[str, Literal["truncate", "split", "wrap"]] = {"bfd": "truncate", "bfd_split": "split", "wrapped": "wrap"}


class Packing(NamedTuple):
    """Tokens that a packed row may hold, and the strategy."""

    capacity: int
    strategy: str


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """No progress bars for copies that take a moment."""
    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.utils.enable_progress_bars()


def pack_table(
    rows: Any, packing: Packing, features: Mapping[str, Any], report: Report, scratch: Path | None
) -> datasets.Dataset:
    """Packs a whole table, and counts in the report; the result is in memory without a folder."""
    with quiet():
        table = rows.flatten_indices(keep_in_memory=True) if rows._indices is not None else rows
    lengths = np.concatenate(
        [np.asarray(chunk.value_lengths()) for chunk in table.data.column("input_ids").chunks]
    ).astype(np.int64)
    made = pack(lengths.tolist(), packing.capacity, overlong=OVERLONG[packing.strategy])
    source = _Columns(table)
    starts = source.starts()
    report.cut_tokens += made.cut
    report.packed_rows, report.capacity, report.tokens, report.target_tokens = 0, packing.capacity, 0, 0
    empty = 0

    def bins() -> Iterator[dict[str, Any]]:
        nonlocal empty
        for pieces in made.bins:
            row = _join(source, starts, pieces)
            targets = int(row["loss_mask"].sum())
            if not targets:
                empty += 1
                continue
            report.packed_rows = (report.packed_rows or 0) + 1
            report.tokens += len(row["input_ids"])
            report.target_tokens += targets
            yield row

    if scratch is None:
        listed = [{key: value.tolist() for key, value in row.items()} for row in bins()]
        packed = datasets.Dataset.from_list(listed, features=datasets.Features(features))
    else:
        packed = _write(bins(), datasets.Features(features), scratch)
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


def _write(rows: Iterator[dict[str, Any]], features: datasets.Features, folder: Path) -> datasets.Dataset:
    from datasets.arrow_writer import ArrowWriter

    path = str(folder / "scratch-packed.arrow")
    with ArrowWriter(features=features, path=path) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return datasets.Dataset.from_file(path)


def pack_rows(rows: Sequence[Mapping[str, Any]], packing: Packing, report: Report) -> dict[str, list[Any]]:
    """Packs the rows of one batch of a stream into columns."""
    lengths = [len(row["input_ids"]) for row in rows]
    made: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_lengths": []}
    for pieces in pack(lengths, packing.capacity, overlong=OVERLONG[packing.strategy]).bins:
        masks = [[False, *rows[row]["loss_mask"][start + 1 : stop]] for row, start, stop in pieces]
        if not any(map(any, masks)):
            continue
        made["input_ids"].append([t for row, start, stop in pieces for t in rows[row]["input_ids"][start:stop]])
        made["loss_mask"].append([target for mask in masks for target in mask])
        made["seq_lengths"].append([stop - start for _, start, stop in pieces])
    assert report.packed_rows is not None
    report.packed_rows += len(made["input_ids"])
    return made

"""The options that name data on a command line, and the rows they stand for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from posttrain_data.errors import DataError, names, nearest
from posttrain_data.sources import DatasetSpec, load_rows


@dataclass
class DatasetOptions:
    """Which rows to train and to evaluate on.

    Example:
        >>> from posttrain_data import DatasetOptions
        >>> DatasetOptions(dataset_name="rows.jsonl", test_split_size=0.1).dataset_train_split
        'train'
    """

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A file (.json, .jsonl, .csv, .parquet), a folder of them, or the name of a data set on the hub."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(
        default="test", metadata={"help": "Split to evaluate on, of a data set on the hub."}
    )
    dataset_streaming: bool = field(default=False, metadata={"help": "Read rows while they are used; needs max_steps."})
    datasets: list[dict[str, Any]] | None = field(
        default=None,
        metadata={
            "help": "A mixture: mappings with path, and name, split, data_files, data_dir, columns, weight, fraction."
        },
    )
    test_split_size: int | float | None = field(
        default=None,
        metadata={"help": "Rows (a whole number), or the share of them below 1, to hold out for evaluation."},
    )

    def __post_init__(self) -> None:
        if self.dataset_name is not None and self.datasets:
            raise DataError("dataset_name and datasets both name the data: write one of them.")
        size = self.test_split_size
        if size is not None and not (size >= 1 if isinstance(size, int) else 0 < size < 1):
            raise DataError(f"test_split_size={size}: write a whole number of rows, or a share above 0 and below 1.")

    @property
    def given(self) -> bool:
        """Whether any data is named."""
        return self.dataset_name is not None or bool(self.datasets)


def load_datasets(options: DatasetOptions, *, evaluate: bool, seed: int = 42) -> tuple[Any, Any]:
    """The rows to train on, and those to evaluate on (None unless `evaluate` or a part is held out).

    Args:
        options: Which.
        evaluate: Whether rows to evaluate on are needed.
        seed: For the choice of held-out rows.

    Raises:
        DataError: The data cannot be read, or there are no rows to evaluate on, with what to set.

    Example:
        >>> from pathlib import Path
        >>> from posttrain_data import DatasetOptions, load_datasets
        >>> file = Path(getfixture("tmp_path")) / "rows.jsonl"
        >>> _ = file.write_text('{"text": "one"}\\n{"text": "two"}\\n')
        >>> train, held_out = load_datasets(DatasetOptions(str(file), test_split_size=1), evaluate=True)
        >>> len(train), len(held_out)
        (1, 1)
    """
    if not options.given:
        raise DataError("dataset_name is missing: name a file, a folder or a data set on the hub.")
    how: dict[str, Any] = {"streaming": options.dataset_streaming, "seed": seed}
    if options.datasets:
        specs = [_spec(index, given) for index, given in enumerate(options.datasets)]
        train, held_out = load_rows(specs, test_split_size=options.test_split_size, **how)
        if evaluate and held_out is None:
            raise DataError("datasets: there are no rows to evaluate on: set test_split_size.")
        return train, held_out
    name = str(options.dataset_name)
    spec = DatasetSpec(name, name=options.dataset_config, split=options.dataset_train_split)
    train, held_out = load_rows(spec, test_split_size=options.test_split_size, **how)
    if evaluate and held_out is None:
        if os.path.exists(name):
            raise DataError(f"{name}: a local file has no split to evaluate on: set test_split_size.")
        test = DatasetSpec(name, name=options.dataset_config, split=options.dataset_test_split)
        held_out, _ = load_rows(test, **how)
    return train, held_out


def _spec(index: int, given: Any) -> DatasetSpec:
    if isinstance(given, str):
        return DatasetSpec(given)
    if not isinstance(given, dict) or "path" not in given:
        raise DataError(f"datasets[{index}]: write a mapping with 'path', not {given!r}.")
    known = {item.name for item in fields(DatasetSpec)}
    for key in given:
        if key not in known:
            close = nearest(key, known)
            hint = f"; did you mean {close!r}?" if close else ""
            raise DataError(f"datasets[{index}]: unknown key {key!r}{hint} (keys: {names(sorted(known))}).")
    return DatasetSpec(**given)

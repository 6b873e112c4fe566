"""Reference log-probabilities of a data set, computed before training and kept by content."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import torch
import torch.distributed as dist
from accelerate import PartialState
from huggingface_hub.constants import HF_HOME
from posttrain_devices import device_spec
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain_models.unwrap import base_model, input_device

if TYPE_CHECKING:
    from posttrain_models.references import Reference

logger = logging.getLogger("posttrain")

SAY_EVERY = 60.0  # seconds
# Columns of completion ids, and where their reference log-probabilities go.
_PAIRS = {"chosen_ids": "chosen_reference_logps", "rejected_ids": "rejected_reference_logps"}
_SINGLES = {"completion_ids": "reference_logps"}


def precompute_reference(
    reference: Reference,
    model: nn.Module,
    rows: Any,
    collator: Callable[..., Any],
    *,
    batch_size: int,
    cache_dir: str | os.PathLike[str] | bool | None = None,
) -> Any:
    """Give every row the log-probabilities of its completion tokens under the reference.

    Afterwards the reference is not needed for these rows: batches bring the values along (`Reference.logps` returns
    them). They are kept in a file named by a hash of the weights, the token ids and the precision, whatever the layout,
    and found there the next time. Processes share the rows and exchange values after every batch, so that none waits
    longer than for one batch.

    Rows are computed in the caller's precision (`torch.autocast`), on the model's device. Their order, and the random
    state, stay as they are. Rows that have the values already are used as they are.

    Args:
        reference: The reference.
        model: The policy, before it is trained.
        rows: Prepared rows with token ids: a map-style data set of `datasets` or a sequence of dicts, with
            `chosen_ids` and `rejected_ids`, or with `completion_ids`.
        collator: Makes a `CompletionBatch` of rows: a `PreferenceCollator` or a `FeedbackCollator`.
        batch_size: Rows in a batch of each process.
        cache_dir: Folder of the kept values; None is `posttrain` in the cache of `datasets`, False keeps none.

    Returns:
        The same rows with `chosen_reference_logps` and `rejected_reference_logps`, or with `reference_logps`: a data
        set for a data set, else a list.

    Raises:
        ValueError: The rows are a stream, or have no completion ids.

    Example:
        >>> from posttrain_collators import PreferenceCollator
        >>> from posttrain_models import tiny_model
        >>> from posttrain_models.references import make_reference
        >>> policy = tiny_model("llama")
        >>> rows = [{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}]
        >>> reference, collator = make_reference(policy), PreferenceCollator(0)
        >>> done = precompute_reference(reference, policy, rows, collator, batch_size=4, cache_dir=False)
        >>> len(done[0]["chosen_reference_logps"])
        2
    """
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise ValueError(
            f"rows is of type {type(rows).__name__}: a stream cannot be computed beforehand, use map-style rows"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if not len(rows):
        return rows
    columns = _PAIRS if "chosen_ids" in rows[0] else _SINGLES
    missing = _survey(rows, columns)
    if not missing.places:
        return rows
    ranks = _Ranks.of(model)
    key = _key(reference, model, missing)
    file = None if cache_dir is False else _folder(cache_dir) / f"reference-{key}.safetensors"
    values = None if file is None else _read(file, missing)
    if not ranks.all_agree(values is not None):
        began = time.monotonic()
        with torch.random.fork_rng(devices=[]):
            values = _compute(reference, model, rows, missing, collator, batch_size, ranks)
        seconds = time.monotonic() - began
        logger.info("reference log-probabilities of %d rows computed in %.0f s", len(missing.places), seconds)
        if file is not None and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            _write(file, values)
    elif file is not None:
        logger.info("reference log-probabilities of %d rows found in %s", len(missing.places), file)
    assert values is not None
    return _with_columns(rows, missing, values, key)


def _folder(given: Any) -> Path:
    if given not in (None, True):
        return Path(given)
    datasets = sys.modules.get("datasets")  # no dependency; who has not imported it has no other place for its cache
    cache = Path(HF_HOME, "datasets") if datasets is None else Path(datasets.config.HF_DATASETS_CACHE)
    return cache / "posttrain"


@dataclass
class _Missing:
    """The rows without values.

    Attributes:
        columns: From columns of ids to columns of values.
        places: Which rows.
        lengths: `(rows, columns)` tokens of their completions.
        totals: `(rows,)` tokens of prompt and completions.
        digest: Of their token ids.
    """

    columns: Mapping[str, str]
    places: list[int]
    lengths: np.ndarray
    totals: np.ndarray
    digest: str


def _survey(rows: Any, columns: Mapping[str, str]) -> _Missing:
    state = hashlib.blake2b(digest_size=16)
    places, lengths, totals = [], [], []
    for index in range(len(rows)):
        row = rows[index]
        if all(row.get(column) is not None for column in columns.values()):
            continue
        absent = [column for column in columns if row.get(column) is None]
        if absent:
            raise ValueError(f"rows[{index}] has no {absent[0]}; its columns are {sorted(row)}")
        ids = [np.asarray(row.get(column) or [], dtype=np.int64) for column in ("prompt_ids", *columns)]
        for one in ids:
            state.update(len(one).to_bytes(8, "little") + one.tobytes())
        places.append(index)
        lengths.append([len(one) for one in ids[1:]])
        totals.append(sum(len(one) for one in ids))
    return _Missing(columns, places, np.array(lengths), np.array(totals), state.hexdigest())


def _key(reference: Reference, model: nn.Module, missing: _Missing) -> str:
    kind = input_device(base_model(model)).type
    precision = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "as stored"
    state = hashlib.blake2b(digest_size=16)
    parts = [*missing.columns, missing.digest, precision, reference.settings(model)]
    for part in [*parts, *_weight_digests(reference.weights(model))]:
        state.update(len(part).to_bytes(8, "little") + part.encode())
    return state.hexdigest()


def _weight_digests(weights: Any) -> list[str]:
    """One digest for each weight, in order of name. Hashing leaves Python's lock, so that threads help."""

    def one(name: str, weight: Tensor) -> str:
        data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{name} {weight.dtype} {tuple(weight.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"

    with ThreadPoolExecutor(max(1, min(8, torch.get_num_threads()))) as pool:
        pending, done = [], []
        for name, weight in weights:
            if isinstance(weight, DTensor):  # gathered one at a time
                done.append(one(name, weight.full_tensor()))
            else:
                pending.append(pool.submit(one, name, weight))
        return sorted([*done, *(result.result() for result in pending)])


@dataclass
class _Ranks:
    """The processes that share the rows."""

    index: int
    size: int
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> _Ranks:
        """All processes; of a model whose parallelism wants the same rows everywhere, each on its own."""
        base = base_model(model)
        device = input_device(base)
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, device)
        _refuse_empty(base)
        if _needs_same_rows(base):
            return cls(0, 1, device)
        if device.type == "cpu" and "gloo" not in dist.get_backend():
            device = PartialState().device  # where the processes can talk
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def all_agree(self, value: bool) -> bool:
        if self.size == 1:
            return value
        flag = torch.tensor([float(value)], device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())

    def gather(self, values: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [values.cpu()]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return [part.cpu() for part in parts]


def _refuse_empty(base: nn.Module) -> None:
    """Refuse a model that only the first process has weights of, which accelerate gives to the others later."""
    on = ("1", "true")
    partial = all(
        os.environ.get(name, "").lower() in on for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    )
    if partial and dist.get_world_size() > 1 and not any(isinstance(p, DTensor) for p in base.parameters()):
        raise ValueError(
            "the reference cannot be computed beforehand while only the first process holds the weights: set "
            "cpu_ram_efficient_loading to false in fsdp_config"
        )


def _needs_same_rows(base: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    sharded = next((p for p in base.parameters() if isinstance(p, DTensor)), None)
    if sharded is None:
        return False
    return not (isinstance(base, FSDPModule) and sharded.device_mesh.size() == dist.get_world_size())


def _compute(
    reference: Reference,
    model: nn.Module,
    rows: Any,
    missing: _Missing,
    collator: Callable[..., Any],
    batch_size: int,
    ranks: _Ranks,
) -> dict[str, np.ndarray]:
    """All values of each column, one row after the other; every process returns all of them."""
    starts = {column: np.cumsum([0, *missing.lengths[:, at]]) for at, column in enumerate(missing.columns.values())}
    values = {column: np.zeros(bounds[-1], dtype=np.float32) for column, bounds in starts.items()}
    # Neighbours of like length waste the least padding.
    order = np.argsort(-missing.totals, kind="stable")
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    width = max(int(missing.lengths[batch].sum()) for batch in batches)
    fill = device_spec(ranks.device).static_shapes
    turns = math.ceil(len(batches) / ranks.size)
    said = time.monotonic()
    for turn in range(turns):
        if ranks.index == 0 and time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            logger.info("reference log-probabilities: %d of %d batches", turn * ranks.size, len(batches))
        theirs = [batches[min(turn * ranks.size + rank, len(batches) - 1)] for rank in range(ranks.size)]
        mine = theirs[ranks.index]
        given = [_without_values(rows[missing.places[at]], missing.columns) for at in mine]
        batch = collator(given, size=batch_size) if fill else collator(given)
        logps = reference.compute(model, batch).float().cpu()
        flat = torch.zeros(width, dtype=torch.float32)
        taken = logps[: len(mine)][batch.completion_mask[: len(mine)].cpu()]
        flat[: len(taken)] = taken
        for part, members in zip(ranks.gather(flat.to(ranks.device)), theirs, strict=True):
            at = 0
            for row in members:
                for column, length in zip(values, missing.lengths[row], strict=True):
                    start = starts[column][row]
                    values[column][start : start + length] = part[at : at + length].numpy()
                    at += length
    return values


def _without_values(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in columns.values()}


def _read(file: Path, missing: _Missing) -> dict[str, np.ndarray] | None:
    """The kept values, if the file is whole."""
    if not file.is_file():
        return None
    try:
        values = load_file(file)
    except (OSError, ValueError, safetensors.SafetensorError):
        values = {}
    sizes = {column: int(missing.lengths[:, at].sum()) for at, column in enumerate(missing.columns.values())}
    if {name: len(value) for name, value in values.items()} != sizes:
        logger.warning("the reference log-probabilities in %s are damaged: they are computed again", file)
        return None
    return {name: values[name] for name in sizes}


def _write(file: Path, values: dict[str, np.ndarray]) -> None:
    """Appears whole, by one rename; without room on the disk, the values are used but not kept."""
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(values, part)
        os.replace(part, file)
    except (OSError, safetensors.SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        logger.warning("the reference log-probabilities could not be kept in %s: %s", file.parent, error)


def _with_columns(rows: Any, missing: _Missing, values: dict[str, np.ndarray], key: str) -> Any:
    new = {}
    for at, (column, flat) in enumerate(values.items()):
        new[column] = np.split(flat, np.cumsum(missing.lengths[:, at])[:-1])
    if not hasattr(rows, "add_column"):
        result = [dict(row) for row in rows]
        for column, parts in new.items():
            for place, part in zip(missing.places, parts, strict=True):
                result[place][column] = part.tolist()
        return result
    for column, parts in new.items():
        every: Sequence[Any] = parts
        if column in rows.column_names:
            known = [None if value is None else np.asarray(value, dtype=np.float32) for value in rows[column]]
            for place, part in zip(missing.places, parts, strict=True):
                known[place] = part
            rows, every = rows.remove_columns(column), known
        rows = rows.add_column(
            column, list(every), new_fingerprint=hashlib.sha1(f"{key} {column}".encode()).hexdigest()
        )
    return rows

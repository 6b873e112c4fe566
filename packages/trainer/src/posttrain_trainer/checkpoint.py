"""Checkpoint folders: whole or absent, and checked before anything is loaded from them."""

import contextlib
import errno
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MANIFEST = "posttrain_manifest.json"
PARTIAL, REPLACED, DELETED = ".incomplete-", ".replaced-", ".deleted-"
JIT_SENTINEL = "checkpoint-is-incomplete.txt"
DISK_FULL = re.compile(r"no space left|storagefull|disk quota exceeded|code: 28\b", re.IGNORECASE)
NOT_LISTED = {"README.md", MANIFEST}

Gather = Callable[[Any], list[Any]]


def tidy(run_dir: Path) -> list[str]:
    """Removes what killed saves and deletions left behind; puts back a checkpoint whose replacement was cut short.

    Args:
        run_dir: The folder that holds the checkpoints; may be absent.

    Returns:
        The names of what was removed.
    """
    removed = []
    for entry in sorted(run_dir.iterdir()) if run_dir.is_dir() else []:
        if entry.name.startswith(REPLACED):
            final = run_dir / entry.name.removeprefix(REPLACED)
            if not final.exists():
                entry.rename(final)
                continue
        elif not entry.name.startswith((PARTIAL, DELETED)) and not (entry / JIT_SENTINEL).exists():
            continue
        shutil.rmtree(entry, ignore_errors=True)
        removed.append(entry.name)
    return removed


@contextlib.contextmanager
def writing(final: Path, *, writer: bool, gather: Gather) -> Iterator[Path]:
    """A folder to write a checkpoint into, which becomes `final` only when every rank has written all of it.

    The files go into a hidden neighbour of `final`, are flushed to the disk, listed with their sizes in a manifest,
    and the folder is renamed. A process killed at any moment leaves `final` as it was or complete.

    Args:
        final: The checkpoint's folder.
        writer: Whether this process creates, seals and renames (one of those that share a file system).
        gather: Exchanges one value between the ranks, in order; also their barrier.

    Yields:
        The hidden folder.

    Raises:
        OSError: `ENOSPC` on every rank, when the disk is full; the partial folder is gone, older checkpoints stay.
    """
    partial = final.with_name(PARTIAL + final.name)
    with _together(partial, final, writer, gather):
        if writer:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    with _together(partial, final, writer, gather):
        yield partial
    with _together(partial, final, writer, gather):
        if writer:
            seal(partial)
            replace(partial, final)


@contextlib.contextmanager
def _together(partial: Path, final: Path, writer: bool, gather: Gather) -> Iterator[None]:
    """All ranks finish the block, or all raise."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # told to the other ranks first, raised below
        failure = error
    full = failure is not None and is_disk_full(failure)
    reports = gather((full, f"{type(failure).__name__}: {failure}") if failure else None)
    if not any(reports):
        return
    if writer:
        shutil.rmtree(partial, ignore_errors=True)
    rank = next(index for index, report in enumerate(reports) if report)
    where = f"saving {final} failed on rank {rank}"
    if any(report and report[0] for report in reports):
        raise OSError(
            errno.ENOSPC,
            f"{where}: no space left on the disk. The partial checkpoint was removed and earlier ones are intact; "
            "free space, or set save_total_limit or save_only_model, then resume",
        ) from failure
    raise failure if failure else RuntimeError(f"{where}: {reports[rank][1]}")


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of torch, safetensors or the operating system means that the disk is full."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if DISK_FULL.search(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def seal(folder: Path) -> None:
    """Writes the manifest and flushes every file and folder to the disk."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in NOT_LISTED
    }
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=1), encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(partial: Path, final: Path) -> None:
    """Renames `partial` to `final`; an older `final` is set aside first and `tidy` restores it if that is cut short."""
    aside = final.with_name(REPLACED + final.name)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove(folder: Path) -> None:
    """Deletes a checkpoint; it disappears under its own name at once."""
    hidden = folder.with_name(DELETED + folder.name)
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def check_files(folder: Path) -> None:
    """Checks that a checkpoint is complete, without loading it.

    Raises:
        ValueError: Naming the folder and the file that is missing, cut short or unreadable.
    """
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint={str(folder)!r}: there is no such folder")
    manifest = folder / MANIFEST
    if manifest.exists():
        for name, size in read_json(manifest)["files"].items():
            path = folder / name
            if not path.is_file():
                raise damaged(folder, name, "is missing")
            if path.stat().st_size != size:
                raise damaged(folder, name, f"has {path.stat().st_size} bytes instead of {size}")
    read_json(folder / "trainer_state.json")
    for pattern in ("*.pt", "*.pth", "*.bin"):
        for path in sorted(folder.glob(pattern)):
            if not zipfile.is_zipfile(path):
                raise damaged(folder, path.name, "is not a file that torch can load")


def check_resumable(folder: Path) -> None:
    """Checks that a checkpoint of unsharded training holds optimiser and scheduler.

    Raises:
        ValueError: Naming the folder and the file that is missing.
    """
    for name in ("optimizer.pt", "scheduler.pt"):
        if not (folder / name).is_file():
            raise damaged(folder, name, "is missing (save_only_model=True leaves it out)")


def read_json(path: Path) -> Any:
    """Reads a JSON file of a checkpoint.

    Raises:
        ValueError: Naming folder and file, if it is missing or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise damaged(path.parent, path.name, "is missing") from None
    except ValueError as error:
        raise damaged(path.parent, path.name, f"is not JSON ({error})") from error


def damaged(folder: Path, name: str, what: str) -> ValueError:
    """The error for a checkpoint that cannot be resumed from."""
    return ValueError(
        f"cannot resume from {folder}: {name} {what}. Resume from another checkpoint, "
        "or load the folder as a model to start a new run"
    )

"""Prepared rows on disk: made once, by whichever process comes first, and found by all others.

Processes meet over files, never over a collective, so preparation may take longer than any collective timeout. The
first to create `<key>.lock` prepares and rewrites a counter in it every few seconds; the others watch that counter.
When it stands still the process is gone, and one of them takes over. The finished folder appears by one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

from posttrain_data.errors import DataError

Result = TypeVar("Result")
BEAT = 2.0  # seconds between two heartbeats
STALE = 60.0  # seconds without a heartbeat after which its process counts as gone
LIMIT = 6 * 3600.0  # seconds that a process waits at most


def digest(*parts: Any) -> str:
    """A hash of strings, bytes and JSON values, the same in every process."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=repr).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Covers everything by which a tokenizer (or the one in a processor) shapes rows, and nothing that calls change."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state["truncation"] = state["padding"] = None
    else:
        added = {str(index): repr(token) for index, token in inner.added_tokens_decoder.items()}
        state = [sorted(inner.get_vocab().items()), added, repr(sorted(inner.init_kwargs.items(), key=str))]
    template = (getattr(inner, "chat_template", None), getattr(tokenizer, "chat_template", None))
    return digest(type(inner).__qualname__, state, inner.special_tokens_map, inner.eos_token_id, template)


def once(
    folder: Path,
    make: Callable[[Path], None],
    load: Callable[[Path], Result],
    *,
    beat: float = BEAT,
    stale: float = STALE,
    limit: float = LIMIT,
) -> Result:
    """`load(folder)`, after `make(temporary folder)` if nobody made it before; one process makes, the others wait.

    Raises:
        DataError: What the preparing process raised, in all of them; after too long a wait, naming who was waited for.
    """
    lock = folder.with_name(folder.name + ".lock")
    error = folder.with_name(folder.name + ".error")
    folder.parent.mkdir(parents=True, exist_ok=True)
    began, seen, seen_at = time.monotonic(), "", time.monotonic()
    token = ""
    while not folder.is_dir():
        if _acquire(lock):
            try:
                if not folder.is_dir():
                    _make(folder, lock, error, make, beat)
            finally:
                lock.unlink(missing_ok=True)
            break
        now = _read(lock)
        token = now.get("token", token)
        state = json.dumps(now)
        if state != seen:
            seen, seen_at = state, time.monotonic()
        _raise_theirs(error, token)
        if time.monotonic() - seen_at > stale:
            _break(lock, seen)
            seen_at = time.monotonic()
        if time.monotonic() - began > limit:
            raise DataError(
                f"waited {limit:.0f} s for process {now.get('pid')} on {now.get('host')} to prepare the rows in "
                f"{folder}: look at that process, or remove {lock} and start again."
            )
        time.sleep(min(0.2, beat))
    return load(folder)


def _acquire(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "token": uuid.uuid4().hex, "beat": 0}))
    return True


def _read(lock: Path) -> dict[str, Any]:
    try:
        return json.loads(lock.read_text() or "{}")
    except (OSError, json.JSONDecodeError):
        return {}


def _break(lock: Path, seen: str) -> None:
    """Removes the lock of a process that is gone; of several waiters one succeeds, and only if nothing has changed."""
    if json.dumps(_read(lock)) != seen:
        return
    aside = lock.with_name(f"{lock.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        os.rename(lock, aside)
        aside.unlink()


def _make(folder: Path, lock: Path, error: Path, make: Callable[[Path], None], beat: float) -> None:
    error.unlink(missing_ok=True)
    mine = _read(lock)
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        with _beating(lock, mine, beat):
            make(temporary)
            with contextlib.suppress(OSError):  # another process that took over was faster: its folder is as good
                os.rename(temporary, folder)
        if not folder.is_dir():
            raise DataError(f"the prepared rows could not be written to {folder}: is the disk full or read-only?")
    except DataError as problem:
        _write(error, {"token": mine.get("token"), "message": str(problem)})
        raise
    except OSError as problem:
        raise DataError(f"the prepared rows could not be written to {folder}: {problem}.") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _beating(lock: Path, mine: dict[str, Any], beat: float) -> Generator[None]:
    done = threading.Event()

    def run() -> None:
        count = 0
        while not done.wait(beat):
            count += 1
            if _read(lock).get("token") != mine.get("token"):
                return  # someone took this process for dead; its rename at the end stays harmless
            _write(lock, {**mine, "beat": count})

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _write(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        aside.write_text(json.dumps(value))
        os.replace(aside, path)


def _raise_theirs(error: Path, token: str) -> None:
    theirs = _read(error) if token else {}
    if theirs and theirs.get("token") == token:
        raise DataError(theirs["message"])

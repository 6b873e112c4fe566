"""What a transformers checkpoint forgets, in one file for each rank."""

from pathlib import Path
from typing import Any

import torch

from posttrain_trainer.checkpoint import damaged

PLAIN = (torch.Tensor, int, float, bool, str, bytes, type(None))


def state_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"posttrain_state_{rank}.pt"


def save_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Writes one rank's state.

    Raises:
        ValueError: If it holds something that cannot be loaded again safely, naming where.
    """
    check_plain(state, "state")
    torch.save(state, folder / state_file(rank))


def load_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Reads one rank's state; None if the checkpoint has none of any rank.

    Raises:
        ValueError: If the file cannot be read, or is missing beside that of the first rank.
    """
    path = folder / state_file(rank)
    if not path.exists():
        if rank:
            raise damaged(folder, path.name, "is missing")
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise damaged(folder, path.name, f"cannot be read ({error})") from error


def check_plain(value: Any, where: str) -> None:
    """Checks that a state is made of tensors, numbers, strings, None, lists, tuples and dicts.

    Raises:
        ValueError: Naming the place and the type found there.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]")
    elif type(value) not in PLAIN and not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{where} is of type {type(value).__name__}: a state that is saved with a checkpoint holds tensors, "
            "numbers, strings, None, lists and dicts"
        )


CALLBACKS = "posttrain_callbacks.pt"


def save_callbacks(folder: Path, callbacks: list[Any]) -> None:
    """Writes the state of every callback that has `state_dict` and `load_state_dict`.

    Raises:
        ValueError: If one holds something that cannot be loaded again safely.
    """
    states = {name: callback.state_dict() for name, callback in _stateful(callbacks)}
    if states:
        check_plain(states, "callbacks")
        torch.save(states, folder / CALLBACKS)


def load_callbacks(folder: Path, callbacks: list[Any]) -> None:
    """Restores callbacks by class name; one that the checkpoint does not have starts anew."""
    path = folder / CALLBACKS
    states = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
    for name, callback in _stateful(callbacks):
        if name in states:
            callback.load_state_dict(states[name])


def _stateful(callbacks: list[Any]) -> list[tuple[str, Any]]:
    return [
        (type(callback).__name__, callback)
        for callback in callbacks
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
    ]

"""Which devices a process may use."""

from __future__ import annotations

import os
import re

from posttrain_devices import neuron
from posttrain_devices.spec import DeviceSpec, device_spec

# Sets of cores whose collectives the runtime can set up where one chip shows four logical cores (trn2.3xlarge, LNC=2).
# A set of one core needs none. Hugging Face's page on Trainium lists these, and 1,2 as an example of what fails.
_LEGAL_OF_FOUR = {frozenset({0, 1}): "0,1", frozenset({2, 3}): "2,3", frozenset({0, 1, 2, 3}): "0-3"}


def check_visible(spec: DeviceSpec, value: str, *, total: int | None = None) -> tuple[str, ...]:
    """Read the value of the variable that says which devices a process may use, before anything is started with it.

    What is known to be illegal is refused; nothing else is. On Trainium a value is an index, a range, or several of
    these joined by commas; where a chip shows four cores (trn2.3xlarge, LNC=2) sets of more than one core must be
    0,1 or 2,3 or 0-3. Which sets other instances allow is not documented, so there only the indices are checked. Not
    verified on hardware.

    Args:
        spec: The device.
        value: What `spec.visible_variable` is, or would be, set to.
        total: How many devices the machine has. None: unknown, or, on Trainium, counted from its device files.

    Returns:
        The devices in order, each as one would write it alone: indices, or identifiers such as "GPU-8a3c...". Empty
        where the value hides every device.

    Raises:
        ValueError: For a value that the device's runtime misreads or cannot use, listing what can be written.

    Example:
        >>> check_visible(device_spec("neuron"), "0-3", total=4)
        ('0', '1', '2', '3')
        >>> check_visible(device_spec("neuron"), "1,2", total=4)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: NEURON_RT_VISIBLE_CORES='1,2' cannot be used: ... or 0,1 or 2,3 or 0-3.
    """
    variable = spec.visible_variable
    if variable is None:
        raise ValueError(f"device {spec.name!r} has no variable that selects devices; {value!r} cannot be applied.")
    parts = [part.strip() for part in value.split(",")] if value.strip() else []
    if spec.name == "neuron":
        return _check_neuron(variable, value, parts, total)
    if spec.name == "cuda":
        if parts in (["-1"], ["NoDevFiles"]):
            return ()
        _check_cuda(variable, value, parts)
    if len(set(parts)) < len(parts):
        raise ValueError(f"{variable}={value!r} names a device twice: name each once.")
    if total is not None:
        _check_range(variable, value, [int(part) for part in parts if part.isdecimal()], total)
    return tuple(parts)


def _check_cuda(variable: str, value: str, parts: list[str]) -> None:
    if all(part.isdecimal() for part in parts) or all(part.startswith(("GPU-", "MIG-")) for part in parts):
        return
    if all(re.fullmatch(r"\d+(-\d+)?", part) for part in parts):
        indices = ",".join(str(index) for part in parts for index in _span(part))
        raise ValueError(f"{variable}={value!r}: CUDA reads no ranges, only the first number of each; write {indices}.")
    raise ValueError(
        f"{variable}={value!r}: write indices such as 0,1, or identifiers such as GPU-8a3c..., not a mixture."
    )


def _check_neuron(variable: str, value: str, parts: list[str], total: int | None) -> tuple[str, ...]:
    if not parts or not all(re.fullmatch(r"\d+(-\d+)?", part) for part in parts):
        raise ValueError(f"{variable}={value!r}: write a core such as 0, a range such as 0-3, or a list such as 0,1.")
    cores = [core for part in parts for core in _span(part)]
    if not cores or len(set(cores)) < len(cores):
        raise ValueError(f"{variable}={value!r} names a core twice or runs backwards: name each once, lowest first.")
    per_chip = neuron.logical_cores_per_chip()
    if total is None:
        total = neuron.chips() * per_chip or None
    if total is not None:
        _check_range(variable, value, cores, total)
    # Without a chip here the run is planned for another machine, or simulated: then the smallest instance decides.
    one_chip = max(cores) < per_chip if total is None else total == per_chip
    if one_chip and per_chip == 4 and len(cores) > 1 and frozenset(cores) not in _LEGAL_OF_FOUR:
        raise ValueError(
            f"{variable}={value!r} cannot be used: on one chip with four logical cores (LNC=2) the runtime sets up "
            f"collectives within pairs or among all; write one core (0, 1, 2 or 3), or "
            f"{' or '.join(_LEGAL_OF_FOUR.values())}."
        )
    return tuple(str(core) for core in cores)


def _check_range(variable: str, value: str, indices: list[int], total: int) -> None:
    beyond = [index for index in indices if index >= total]
    if beyond:
        legal = f"0 to {total - 1}" if total else "none"
        raise ValueError(f"{variable}={value!r}: there is no device {beyond[0]} here; this machine has {legal}.")


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def local_devices() -> int:
    """Return how many accelerators this process, or those it starts, may use; 0 on a machine with a CPU alone.

    On Trainium the logical cores are counted from the device files and `NEURON_RT_VISIBLE_CORES` (else
    `NEURON_RT_NUM_CORES`), since asking PyTorch could start the runtime, which keeps every core for this process.
    Elsewhere PyTorch is asked; on CUDA that does not stop later processes from using the devices.

    Raises:
        ValueError: If the variable has a value that cannot be used on Trainium.

    Example:
        >>> from posttrain_devices import local_devices
        >>> local_devices() >= 0
        True
    """
    if neuron.package().kind == "native" and neuron.chips():
        cores = neuron.chips() * neuron.logical_cores_per_chip()
        spec = device_spec("neuron")
        visible = os.environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
        if visible:
            return len(check_visible(spec, visible, total=cores))
        wanted = os.environ.get("NEURON_RT_NUM_CORES", "").strip()
        return min(cores, int(wanted) if wanted.isdecimal() and int(wanted) else cores)

    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0

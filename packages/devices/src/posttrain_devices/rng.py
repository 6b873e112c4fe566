"""The state of the random number generators of a kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain_devices.spec import DeviceSpec

if TYPE_CHECKING:
    import torch


def rng_state(spec: DeviceSpec) -> list[torch.Tensor]:
    """Return the state of the default generator of every device of this kind that the process sees.

    Dropout draws from the generator of the device it runs on, so a run resumes exactly only if that is restored; the
    CPU's is another, read with `rng_state(device_spec("cpu"))`.

    Returns:
        One uint8 tensor on the CPU for each device. They can be saved in a checkpoint and loaded with
        `torch.load(..., weights_only=True)`.

    Example:
        >>> import torch
        >>> from posttrain_devices import device_spec
        >>> cpu = device_spec("cpu")
        >>> state = rng_state(cpu)
        >>> first = torch.rand(3)
        >>> set_rng_state(cpu, state)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    import torch

    if spec.name == "cpu":
        states = [torch.get_rng_state()]
    elif spec.name == "mps":  # one device, and no function that takes an index
        states = [torch.mps.get_rng_state()]
    else:
        module = torch.get_device_module(spec.name)
        states = [module.get_rng_state(torch.device(spec.name, index)) for index in range(module.device_count())]
    return [state.cpu().clone() for state in states]


def set_rng_state(spec: DeviceSpec, states: Sequence[torch.Tensor]) -> None:
    """Restore what `rng_state` returned.

    Raises:
        ValueError: If there are not as many states as devices: the run cannot go on exactly as it would have.

    Example:
        >>> import torch
        >>> from posttrain_devices import device_spec, rng_state, set_rng_state
        >>> spec = device_spec("cpu")
        >>> before = rng_state(spec)
        >>> first = torch.rand(2)
        >>> set_rng_state(spec, before)
        >>> bool((torch.rand(2) == first).all())
        True
    """
    import torch

    single = spec.name in ("cpu", "mps")
    count = 1 if single else torch.get_device_module(spec.name).device_count()
    if len(states) != count:
        raise ValueError(
            f"states has {len(states)} generator states, but this process sees {count} devices of kind {spec.name!r}: "
            f"resume with as many devices as the run was saved with."
        )
    if spec.name == "cpu":
        torch.set_rng_state(states[0].cpu())
    elif spec.name == "mps":
        torch.mps.set_rng_state(states[0].cpu())
    else:
        module = torch.get_device_module(spec.name)
        for index, state in enumerate(states):
            module.set_rng_state(state.cpu(), torch.device(spec.name, index))

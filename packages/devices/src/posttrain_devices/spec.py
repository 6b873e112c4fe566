"""The facts of each kind of device, one line of a table each."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain_devices import neuron

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceSpec:
    """What a program must know about a kind of device.

    Nothing here depends on the machine; `device_spec` picks the right one. The facts about Trainium are those of AWS's
    documents of Neuron SDK 2.33 and Hugging Face's pages on Trainium; none has been verified on hardware by this
    project.

    Attributes:
        name: The device type, as in `torch.device(name)`; "cuda" stands for ROCm too.
        collectives: The torch.distributed backend of its tensors.
        visible_variable: The environment variable that says which devices a process may use; None if there is none.
        pad_multiple: What `pad_to_multiple_of="auto"` means here: 128 on Trainium, None elsewhere.
        static_shapes: Whether each new shape costs a compilation (about a minute on Trainium), in eager mode too.
        max_shapes: How many widths to plan for by default; None for no limit.
        compile_backend: The backend to give to `torch.compile`.
        autocast_dtypes: Names of the dtypes `torch.autocast` takes on this device.
        static_cache: Whether `generate` needs a cache of one size (`cache_implementation="static"`): a cache that grows
            has a new shape for every token.
        cache_dtype: Name of the dtype that a static cache, and the model that fills it, must have; None for the
            model's own. On Trainium a float32 model ends with keys and values in different dtypes.
        inputs_on_cpu: Whether `generate` is given inputs on the CPU: it then moves only what the forward consumes, and
            tensors that grow by a token stay off the device.
    """

    name: str
    collectives: str
    visible_variable: str | None = None
    pad_multiple: int | None = None
    static_shapes: bool = False
    max_shapes: int | None = None
    compile_backend: str = "inductor"
    autocast_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    static_cache: bool = False
    cache_dtype: str | None = None
    inputs_on_cpu: bool = False

    @property
    def compile_options(self) -> dict[str, Any]:
        """Keyword arguments for `torch.compile`. On Trainium `dynamic=True` is rejected and "default" the only mode."""
        options: dict[str, Any] = {"backend": self.compile_backend}
        if self.static_shapes:
            options["dynamic"] = False
        return options

    @property
    def device_map(self) -> str:
        """What to pass as `device_map` to load a model here. Never "auto", which lands on the CPU beside a Trainium."""
        return self.name


# Trainium: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/ (about, compile reference, environment
# variables). Other accelerators: the backends and variables that accelerate 1.15 uses; not verified on hardware.
_SPECS = {
    spec.name: spec
    for spec in (
        DeviceSpec("cpu", collectives="gloo"),
        DeviceSpec("cuda", collectives="nccl", visible_variable="CUDA_VISIBLE_DEVICES"),
        DeviceSpec(
            "neuron",
            collectives="neuron",
            visible_variable="NEURON_RT_VISIBLE_CORES",
            pad_multiple=128,
            static_shapes=True,
            max_shapes=2,
            compile_backend="neuron",
            autocast_dtypes=("bfloat16",),
            static_cache=True,
            cache_dtype="bfloat16",
            inputs_on_cpu=True,
        ),
        DeviceSpec("mps", collectives="gloo"),
        DeviceSpec("xpu", collectives="xccl", visible_variable="ZE_AFFINITY_MASK"),
        DeviceSpec("npu", collectives="hccl", visible_variable="ASCEND_RT_VISIBLE_DEVICES"),
        DeviceSpec("hpu", collectives="hccl", visible_variable="HABANA_VISIBLE_MODULES"),
        DeviceSpec("mlu", collectives="cncl", visible_variable="MLU_VISIBLE_DEVICES"),
        DeviceSpec("musa", collectives="mccl", visible_variable="MUSA_VISIBLE_DEVICES"),
        DeviceSpec("sdaa", collectives="tccl", visible_variable="SDAA_VISIBLE_DEVICES"),
    )
}


def device_spec(device: str | torch.device | None = None) -> DeviceSpec:
    """Return the facts about a kind of device.

    A named device need not be present, so that a run for another machine can be planned here. torch is imported only
    for None without Trainium, and for a name that is not in the table (an accelerator that registered itself with
    PyTorch). Trainium chips that no package can use are worth a warning, since the CPU takes their place.

    Args:
        device: "cpu", "cuda:0", a `torch.device`, ...; None for the accelerator of this machine, or the CPU.

    Raises:
        ValueError: For a name PyTorch does not know, and for "xla" (Trainium through the old plug-in, or a TPU).

    Example:
        >>> device_spec("neuron").compile_options
        {'backend': 'neuron', 'dynamic': False}
        >>> device_spec("cuda:1").collectives
        'nccl'
    """
    name = _device_here() if device is None else str(device).partition(":")[0]
    if name in _SPECS:
        return _SPECS[name]
    if name == "xla":
        raise ValueError(
            "device='xla' is not supported. On Trainium uninstall torch-xla and install the native TorchNeuron "
            "(torch-neuronx 2.13 or later, from AWS's index), whose device is 'neuron'."
        )
    return _registered_spec(name)


def _device_here() -> str:
    if neuron.chips():
        problem = neuron.package_problem()
        if problem is None:
            return "neuron"  # PyTorch is not asked, since that could start the runtime
        warnings.warn(f"Trainium chips are here, but cannot be used: {problem}", stacklevel=3)
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _registered_spec(name: str) -> DeviceSpec:
    """Facts about an accelerator that is not in the table, as far as PyTorch knows them."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != name:
        raise ValueError(f"device={name!r} is unknown here: write one of {', '.join(_SPECS)}.")
    backend = "gloo"
    if torch.distributed.is_available():
        backend = torch.distributed.Backend.default_device_backend_map.get(name, backend)
    return DeviceSpec(name, collectives=backend)


def resolve_pad_multiple(value: int | str | None, spec: DeviceSpec) -> int | None:
    """Turn the option `pad_to_multiple_of` into a number, or None for no rounding.

    Args:
        value: A positive integer, "auto" (what suits the device), "none" or None; a command line's "64" will do.
        spec: The device.

    Raises:
        ValueError: For anything else.

    Example:
        >>> resolve_pad_multiple("auto", device_spec("neuron"))
        128
        >>> resolve_pad_multiple("auto", device_spec("cpu")) is None
        True
        >>> resolve_pad_multiple("64", device_spec("cpu"))
        64
    """
    text = str(value).strip().lower()
    if text == "auto":
        return spec.pad_multiple
    if text == "none":
        return None
    if not isinstance(value, bool) and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"pad_to_multiple_of={value!r}: write a positive integer, 'auto' or 'none'.")

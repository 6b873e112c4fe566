"""What is on this machine, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import os
import platform
from typing import Any, Literal, NamedTuple

from posttrain_devices import neuron
from posttrain_devices.precision import supports_bf16
from posttrain_devices.spec import DeviceSpec, device_spec
from posttrain_devices.visible import check_visible


class Fact(NamedTuple):
    """One line of a diagnosis.

    Attributes:
        level: "ok"; "warning": works, but not as one would expect; "error": has to be repaired before training.
        message: The finding, and for the last two what to do.
    """

    level: Literal["ok", "warning", "error"]
    message: str


def diagnose() -> list[Fact]:
    """Look at PyTorch, the devices, their variables, and on Trainium at driver, cores and packages.

    Never raises for what it finds. Unlike the rest of the package it may start a device's runtime, to name the devices.

    Example:
        >>> facts = diagnose()
        >>> facts[0].message.startswith("Python 3.")
        True
    """
    import torch

    facts = [
        Fact("ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"),
        Fact("ok", f"torch {torch.__version__}, built for {_build(torch)}"),
    ]
    try:
        spec = device_spec()
    except ValueError as error:
        return [*facts, Fact("error", str(error)), *_neuron_facts()]
    facts += _device_facts(spec)
    facts.append(_bf16_fact(spec))
    facts += _variable_facts(spec)
    if spec.name != "cuda" and _nvidia_here():
        facts.append(Fact("warning", _why_no_cuda(torch)))
    return facts + _neuron_facts()


def _build(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if getattr(torch.version, "xpu", None):
        return f"XPU {torch.version.xpu}"
    return "Metal and the CPU" if torch.backends.mps.is_built() else "the CPU alone"


def _device_facts(spec: DeviceSpec) -> list[Fact]:
    import torch

    if spec.name == "cpu":
        return [Fact("ok", f"no accelerator: everything runs on the CPU ({os.cpu_count()} cores)")]
    if spec.name == "mps":
        return [Fact("ok", "mps: the GPU of this Mac")]
    module = torch.get_device_module(spec.name)
    facts = []
    try:
        for index in range(module.device_count()):
            properties = module.get_device_properties(index)
            memory = getattr(properties, "total_memory", None)
            size = f", {memory / 2**30:.1f} GiB" if memory else ""
            facts.append(Fact("ok", f"{spec.name}:{index} {properties.name}{size}"))
    except RuntimeError as error:  # the runtime refuses to start, for instance because another process has the device
        facts.append(Fact("error", f"{spec.name}: the runtime does not start: {str(error).strip().splitlines()[0]}"))
    return facts


def _bf16_fact(spec: DeviceSpec) -> Fact:
    if supports_bf16(spec):
        return Fact("ok", f"bfloat16 in hardware on {spec.name}")
    return Fact("warning", f"no bfloat16 in hardware on {spec.name}: train in float32, or with fp16 on a GPU")


def _variable_facts(spec: DeviceSpec) -> list[Fact]:
    if spec.visible_variable is None or spec.visible_variable not in os.environ:
        return []
    value = os.environ[spec.visible_variable]
    try:
        devices = check_visible(spec, value)
    except ValueError as error:
        return [Fact("error", str(error))]
    return [Fact("ok", f"{spec.visible_variable}={value}: {len(devices)} devices")]


def _nvidia_here() -> bool:
    return (neuron.ROOT / "proc/driver/nvidia/version").exists()


def _why_no_cuda(torch: Any) -> str:
    if torch.version.cuda is None:
        return "an NVIDIA driver is here, but this torch is built without CUDA: install a CUDA build of torch"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "an NVIDIA driver is here, but CUDA_VISIBLE_DEVICES hides every GPU: unset it"
    return "an NVIDIA driver is here, but torch finds no GPU: is the driver as new as CUDA " + torch.version.cuda + "?"


def _neuron_facts() -> list[Fact]:
    instance = neuron.system_file("sys/devices/virtual/dmi/id/product_name") or ""
    chips = neuron.chips()
    on_trainium = chips > 0 or instance.startswith("trn")
    if not on_trainium and neuron.package().kind is None:
        return []
    facts = []
    if on_trainium:
        facts.append(_driver_fact(instance, chips))
    if chips:
        facts.append(_cores_fact(chips))
    facts.append(_package_fact(on_trainium))
    if importlib.util.find_spec("torch_xla") is not None:
        facts.append(Fact("warning", "torch-xla is installed and takes over device detection: uninstall it"))
    return facts


def _driver_fact(instance: str, chips: int) -> Fact:
    if not chips:
        return Fact("error", f"{instance} has Trainium chips, but there is no /dev/neuron0: install the Neuron driver")
    version = neuron.system_file("sys/module/neuron/version") or "of unknown version"
    return Fact("ok", f"Neuron driver {version}, chips: {chips}" + (f", instance {instance}" if instance else ""))


def _cores_fact(chips: int) -> Fact:
    try:
        cores = neuron.logical_cores_per_chip()
    except ValueError as error:
        return Fact("error", str(error))
    return Fact("ok", f"LNC={neuron.CORES_PER_CHIP // cores}: {chips * cores} logical NeuronCores")


def _package_fact(on_trainium: bool) -> Fact:
    import torch

    problem = neuron.package_problem()
    if problem is not None:
        return Fact("error", problem)
    version = neuron.package().version
    name = "native TorchNeuron" + (f" {version}" if version else "")
    if not hasattr(torch, "neuron"):
        return Fact("error", f"{name} is installed, but PyTorch did not load it: unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    if not on_trainium:
        return Fact("warning", f"{name} is installed, but no Trainium chip is here")
    return Fact("ok", name)

"""Trainium as the operating system shows it, without starting its runtime.

The Neuron runtime reserves every core it starts with for one process. So whoever only wants to know what is here, such
as a launcher, must not ask PyTorch; it reads device files, package metadata and the environment instead. Not verified
on hardware.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

# https://awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-features/logical-neuroncore-config.html
CORES_PER_CHIP = 8
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
DEFAULT_LNC = 2
ROOT = Path("/")


class Package(NamedTuple):
    """What is installed under the name torch-neuronx, and its version where the metadata tell."""

    kind: Literal["native", "xla", "placeholder"] | None
    version: str | None


def package() -> Package:
    """Tell the native TorchNeuron from the XLA plug-in and from PyPI's placeholder, all named torch-neuronx.

    Only the native package has PyTorch load it by itself (entry point group `torch.backends`). PyPI's version 1.0 is
    a module that raises on import. Every other release is the plug-in for torch-xla. Nothing is imported.
    """
    import importlib.metadata  # here, since it is a third of the cost of importing this package
    import importlib.util

    try:
        version = importlib.metadata.version("torch-neuronx")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if any(
        point.module.startswith("torch_neuronx") for point in importlib.metadata.entry_points(group="torch.backends")
    ):
        return Package("native", version)
    if version in ("1.0", "1.0.0"):
        return Package("placeholder", version)
    if version is not None or importlib.util.find_spec("torch_neuronx") is not None:
        return Package("xla", version)
    return Package(None, None)


def package_problem() -> str | None:
    """Say what is wrong with the installed torch-neuronx and what to install; None if it is native and fits torch."""
    installed = package()
    if installed.kind == "native" and installed.version is None:
        return None  # a stand-in that goes by another name
    import importlib.metadata

    torch = ".".join(importlib.metadata.version("torch").split(".")[:2])
    if installed.kind == "native" and f"{installed.version}.".startswith(f"{torch}."):
        return None
    found = {
        None: "torch-neuronx is not installed",
        "placeholder": f"torch-neuronx {installed.version} is PyPI's placeholder",
        "xla": f"torch-neuronx {installed.version} is the plug-in for torch-xla, not the native TorchNeuron",
        "native": f"torch-neuronx {installed.version} does not fit torch {torch}",
    }[installed.kind]
    return f"{found}: pip install 'torch-neuronx=={torch}.*' from the package index of AWS's Neuron setup guide"


def chips() -> int:
    """Return the number of Trainium chips whose device files are here."""
    return sum(1 for _ in (ROOT / "dev").glob("neuron[0-9]*"))


def logical_cores_per_chip(environ: Mapping[str, str] | None = None) -> int:
    """Return how many cores a process sees for each chip: 8 physical ones in groups of LNC (2 unless set).

    Raises:
        ValueError: If `NEURON_LOGICAL_NC_CONFIG` is neither 1 nor 2.
    """
    environ = os.environ if environ is None else environ
    lnc = environ.get(LNC_VARIABLE, str(DEFAULT_LNC)).strip()
    if lnc not in ("1", "2"):
        raise ValueError(f"{LNC_VARIABLE}={lnc!r}: write 1 or 2, the physical cores of a logical one.")
    return CORES_PER_CHIP // int(lnc)


def system_file(path: str) -> str | None:
    """Return the text of a file of the system, None where it is not there or may not be read."""
    try:
        return (ROOT / path).read_text().strip()
    except OSError:
        return None

"""A machine with Trainium, as far as files, packages and `torch.neuron` can pretend one."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from posttrain_devices import neuron


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch, tmp_path):
    """No device files, no torch-neuronx, no variables, whatever this machine has."""
    monkeypatch.setattr(neuron, "ROOT", tmp_path / "root")
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install(monkeypatch):
    """Pretend that torch-neuronx is installed: `install(version, native=...)`."""

    def apply(version, native):
        real_version, real_spec = importlib.metadata.version, importlib.util.find_spec
        real_points = importlib.metadata.entry_points
        point = importlib.metadata.EntryPoint("torch_neuronx", "torch_neuronx:_autoload", "torch.backends")

        def entry_points(**query):
            return [point] if native and query == {"group": "torch.backends"} else real_points(**query)

        def get_version(name):
            if name != "torch-neuronx":
                return "2.14.1" if name == "torch" else real_version(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", get_version)
        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: object() if name == "torch_neuronx" else real_spec(name)
        )

    return apply


@pytest.fixture
def add_chips():
    """Put device files of Trainium chips and its driver's version where the package looks."""

    def apply(number, instance="trn2.3xlarge"):
        (neuron.ROOT / "dev").mkdir(parents=True)
        for index in range(number):
            (neuron.ROOT / f"dev/neuron{index}").touch()
        for path, text in {"sys/module/neuron": "2.31.7", "sys/devices/virtual/dmi/id": instance}.items():
            (neuron.ROOT / path).mkdir(parents=True)
            (neuron.ROOT / path / ("version" if "module" in path else "product_name")).write_text(text + "\n")

    return apply


class FakeNeuron(SimpleNamespace):
    """`torch.neuron` with some cores, each with a generator of its own."""

    def __init__(self, cores):
        self.generators = [torch.Generator().manual_seed(index) for index in range(cores)]

    def is_available(self):
        return bool(self.generators)

    def device_count(self):
        return len(self.generators)

    def get_rng_state(self, device):
        assert device.type == "neuron"
        return self.generators[device.index].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index].set_state(state)

    def get_device_properties(self, index):
        return SimpleNamespace(name="trn2", total_memory=24 * 2**30)


@pytest.fixture
def torch_neuron(monkeypatch):
    """Give torch a `neuron` accelerator: `torch_neuron(cores)` returns its module."""

    def apply(cores):
        module = FakeNeuron(cores)
        real_module, real_device = torch.get_device_module, torch.device
        monkeypatch.setattr(torch, "neuron", module, raising=False)
        monkeypatch.setattr(torch, "get_device_module", lambda name: module if name == "neuron" else real_module(name))
        monkeypatch.setattr(
            torch,
            "device",
            lambda *a: SimpleNamespace(type=a[0], index=a[1]) if a[0] == "neuron" else real_device(*a),
        )
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: SimpleNamespace(type="neuron")
        )
        monkeypatch.setattr(torch.accelerator, "is_available", module.is_available)
        monkeypatch.setattr(torch.accelerator, "device_count", module.device_count)
        return module

    return apply


@pytest.fixture
def no_accelerator(monkeypatch):
    """A machine with a CPU alone."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

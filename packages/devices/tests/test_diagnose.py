import importlib.util
from types import SimpleNamespace

import pytest
import torch
from posttrain_devices import diagnose, neuron


@pytest.fixture(autouse=True)
def no_torch_xla(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else real(name))


def messages(level):
    return [fact.message for fact in diagnose() if fact.level == level]


def test_a_plain_cpu(no_accelerator):
    assert not messages("error")
    assert any(message.startswith("no accelerator") for message in messages("ok"))
    assert any(torch.__version__ in message for message in messages("ok"))


def test_a_working_trainium(install, add_chips, torch_neuron, monkeypatch):
    install("2.14.3.0.9", native=True)
    add_chips(1)
    torch_neuron(4)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
    facts = messages("ok")
    assert not messages("error") and not messages("warning")
    assert "neuron:3 trn2, 24.0 GiB" in facts
    assert "LNC=2: 4 logical NeuronCores" in facts
    assert "Neuron driver 2.31.7, chips: 1, instance trn2.3xlarge" in facts
    assert "native TorchNeuron 2.14.3.0.9" in facts
    assert "NEURON_RT_VISIBLE_CORES=0-3: 4 devices" in facts


@pytest.mark.parametrize(
    ("version", "native", "match"),
    [
        ("1.0", False, "torch-neuronx 1.0 is PyPI's placeholder"),
        ("2.9.0.2.15.32035", False, "plug-in for torch-xla, not the native TorchNeuron"),
        ("2.13.3.0.1", True, "torch-neuronx 2.13.3.0.1 does not fit torch 2.14"),
    ],
)
@pytest.mark.filterwarnings("ignore:Trainium chips")
def test_wrong_packages(install, add_chips, no_accelerator, version, native, match):
    install(version, native)
    add_chips(1)
    (error,) = messages("error")
    assert match in error
    assert error.endswith("pip install 'torch-neuronx==2.14.*' from the package index of AWS's Neuron setup guide")


@pytest.mark.filterwarnings("ignore:Trainium chips")
def test_a_missing_package_and_a_missing_driver(add_chips, no_accelerator):
    add_chips(0)
    assert any("no /dev/neuron0: install the Neuron driver" in message for message in messages("error"))
    assert any("torch-neuronx is not installed" in message for message in messages("error"))


def test_a_package_that_torch_did_not_load(install, add_chips, monkeypatch):
    install("2.14.3.0.9", native=True)
    add_chips(1)
    broken = SimpleNamespace(device_count=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda name: broken)
    assert any(
        "PyTorch did not load it: unset TORCH_DEVICE_BACKEND_AUTOLOAD" in message for message in messages("error")
    )


def test_illegal_settings(install, add_chips, torch_neuron, monkeypatch):
    install("2.14.3.0.9", native=True)
    add_chips(1)
    torch_neuron(4)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "1,2")
    (error,) = messages("error")
    assert "0,1 or 2,3 or 0-3" in error
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "3")
    assert any("NEURON_LOGICAL_NC_CONFIG='3'" in message for message in messages("error"))


def test_a_runtime_that_does_not_start(install, add_chips, torch_neuron):
    install("2.14.3.0.9", native=True)
    add_chips(1)

    def fail():
        raise RuntimeError("nrt_init failed: core 0 is in use\ntrace")

    torch_neuron(4).device_count = fail
    assert "neuron: the runtime does not start: nrt_init failed: core 0 is in use" in messages("error")


def test_xla_takes_the_place_of_the_accelerator(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: SimpleNamespace(type="xla")
    )
    assert any("'xla' is not supported" in message for message in messages("error"))


@pytest.mark.parametrize(
    ("cuda", "visible", "match"),
    [(None, None, "built without CUDA"), ("13.2", "", "hides every GPU"), ("13.2", None, "as new as CUDA 13.2")],
)
def test_a_gpu_that_torch_does_not_see(no_accelerator, monkeypatch, cuda, visible, match):
    (neuron.ROOT / "proc/driver/nvidia").mkdir(parents=True)
    (neuron.ROOT / "proc/driver/nvidia/version").touch()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (warning,) = [message for message in messages("warning") if "NVIDIA" in message]
    assert match in warning

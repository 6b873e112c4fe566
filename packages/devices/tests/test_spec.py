import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from posttrain_devices import device_spec, neuron, resolve_pad_multiple


def test_cpu_is_the_device_of_a_machine_without_accelerator(no_accelerator):
    spec = device_spec()
    assert (spec.name, spec.collectives, spec.device_map) == ("cpu", "gloo", "cpu")
    assert not spec.static_shapes and spec.pad_multiple is None and spec.max_shapes is None


def test_the_accelerator_is_found_by_torch(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert device_spec().name == "cuda"


def test_neuron_facts():
    spec = device_spec("neuron:3")
    assert (spec.name, spec.device_map, spec.collectives) == ("neuron", "neuron", "neuron")
    assert (spec.pad_multiple, spec.max_shapes, spec.static_shapes) == (128, 2, True)
    assert spec.compile_options == {"backend": "neuron", "dynamic": False}
    assert spec.static_cache and spec.inputs_on_cpu and spec.cache_dtype == "bfloat16"
    assert all(hasattr(torch, name) for name in (*spec.autocast_dtypes, spec.cache_dtype))


def test_neuron_is_found_through_torch_where_it_is_simulated(torch_neuron):
    torch_neuron(2)
    assert device_spec().name == "neuron"


def test_neuron_is_found_by_its_device_files_without_asking_torch(install, add_chips, monkeypatch):
    install("2.14.3.0.1", native=True)
    add_chips(1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", None)  # would raise if called
    assert device_spec().name == "neuron"


def test_trainium_without_its_package_is_never_silently_the_cpu(add_chips, no_accelerator):
    add_chips(1)
    with pytest.warns(UserWarning, match="chips are here, but cannot be used: torch-neuronx is not installed"):
        assert device_spec().name == "cpu"


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_names_and_devices(device):
    spec = device_spec(device)
    assert (spec.name, spec.collectives, spec.visible_variable) == ("cuda", "nccl", "CUDA_VISIBLE_DEVICES")
    assert spec.compile_options == {"backend": "inductor"}


@pytest.mark.parametrize("name", ["mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa"])
def test_generic_accelerators(name):
    spec = device_spec(name)
    assert spec.name == name and spec.pad_multiple is None and not spec.static_shapes
    # "fake" is a stand-in of PyTorch's own tests until the accelerator's package registers its backend.
    known = torch.distributed.Backend.default_device_backend_map.get(name, "fake")
    assert known in (spec.collectives, "fake")


def test_an_accelerator_that_registered_itself(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: SimpleNamespace(type="newchip")
    )
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, "newchip", "newccl")
    assert device_spec().collectives == "newccl"


def test_refuses_xla_and_unknown_names(no_accelerator):
    with pytest.raises(ValueError, match="'xla' is not supported.*TorchNeuron"):
        device_spec("xla:0")
    with pytest.raises(ValueError, match="device='gpu' is unknown here: write one of cpu, cuda, neuron"):
        device_spec("gpu")


def test_specs_are_plain_values():
    spec = device_spec("neuron")
    assert pickle.loads(pickle.dumps(spec)) == spec and hash(spec) == hash(device_spec("neuron"))


@pytest.mark.parametrize(
    ("value", "device", "expected"),
    [
        ("auto", "neuron", 128),
        ("auto", "cuda", None),
        ("Auto", "neuron", 128),
        (None, "neuron", None),
        ("none", "neuron", None),
        ("None", "neuron", None),
        (64, "neuron", 64),
        ("64", "cpu", 64),
        (1, "cpu", 1),
    ],
)
def test_pad_multiple(value, device, expected):
    assert resolve_pad_multiple(value, device_spec(device)) == expected


@pytest.mark.parametrize("value", [0, -8, "0", "-8", "", "automatic", 1.5, True, False, "1e3"])
def test_refuses_pad_multiples(value):
    with pytest.raises(ValueError, match="pad_to_multiple_of=.*'auto' or 'none'"):
        resolve_pad_multiple(value, device_spec("cpu"))


def test_import_and_named_devices_need_no_torch():
    code = "import sys, posttrain_devices as p; p.device_spec('neuron'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("version", "native", "kind"),
    [
        ("2.14.3.0.123", True, "native"),
        (None, True, "native"),  # a simulator under another name
        ("2.9.0.2.15.32035", False, "xla"),
        ("1.13.1.1.4", False, "xla"),
        ("1.0", False, "placeholder"),
    ],
)
def test_tells_packages_of_one_name_apart(install, version, native, kind):
    install(version, native)
    assert neuron.package().kind == kind


def test_no_package():
    assert neuron.package() == (None, None)

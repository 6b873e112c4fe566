import pytest
import torch
from posttrain_devices import check_visible, device_spec, local_devices

NEURON, CUDA = device_spec("neuron"), device_spec("cuda")


@pytest.mark.parametrize(
    ("value", "cores"),
    [
        ("0", "0"),
        ("1", "1"),
        ("3", "3"),
        ("0,1", "01"),
        ("0-1", "01"),
        ("2,3", "23"),
        ("2-3", "23"),
        (" 2 , 3 ", "23"),
        ("0-3", "0123"),
        ("0,1,2,3", "0123"),
        ("0-1,2-3", "0123"),
    ],
)
@pytest.mark.parametrize("total", [4, None])
def test_legal_cores_of_one_chip(value, cores, total):
    assert check_visible(NEURON, value, total=total) == tuple(cores)


@pytest.mark.parametrize("value", ["1,2", "1-2", "0,2", "0,3", "1,3", "0-2", "1-3"])
@pytest.mark.parametrize("total", [4, None])
def test_illegal_cores_of_one_chip(value, total):
    with pytest.raises(ValueError, match=rf"NEURON_RT_VISIBLE_CORES='{value}'.*0,1 or 2,3 or 0-3"):
        check_visible(NEURON, value, total=total)


def test_other_instances_are_only_checked_for_range():
    assert check_visible(NEURON, "1,2", total=64) == ("1", "2")
    assert len(check_visible(NEURON, "0-63")) == 64
    with pytest.raises(ValueError, match="no device 64 here; this machine has 0 to 63"):
        check_visible(NEURON, "60-64", total=64)


def test_one_physical_core_each(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert check_visible(NEURON, "1,2", total=8) == ("1", "2")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "4")
    with pytest.raises(ValueError, match="NEURON_LOGICAL_NC_CONFIG='4': write 1 or 2"):
        check_visible(NEURON, "0")


def test_cores_are_counted_from_device_files(add_chips):
    add_chips(1)
    with pytest.raises(ValueError, match="no device 4 here; this machine has 0 to 3"):
        check_visible(NEURON, "4")


@pytest.mark.parametrize("value", ["", "a", "0;1", "0,", "-1", "0-", "1.5"])
def test_refuses_what_is_no_list_of_cores(value):
    with pytest.raises(ValueError, match="write a core such as 0, a range such as 0-3, or a list such as 0,1"):
        check_visible(NEURON, value)


@pytest.mark.parametrize("value", ["0,0", "0-1,1", "3-0"])
def test_refuses_cores_twice_or_backwards(value):
    with pytest.raises(ValueError, match="names a core twice or runs backwards"):
        check_visible(NEURON, value)


@pytest.mark.parametrize(
    ("value", "devices"),
    [("0", ("0",)), ("1,0", ("1", "0")), ("", ()), ("-1", ()), ("GPU-8a3c,GPU-77", ("GPU-8a3c", "GPU-77"))],
)
def test_cuda(value, devices):
    assert check_visible(CUDA, value, total=2) == devices


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("0-3", "write 0,1,2,3"),
        ("0,2-3", "write 0,2,3"),
        ("0,GPU-8a3c", "not a mixture"),
        ("1,1", "names a device twice"),
        ("0,8", "no device 8 here; this machine has 0 to 1"),
    ],
)
def test_refuses_cuda(value, match):
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES='{value}'.*{match}"):
        check_visible(CUDA, value, total=2)


def test_other_devices():
    assert check_visible(device_spec("npu"), "0,1") == ("0", "1")
    with pytest.raises(ValueError, match="'cpu' has no variable"):
        check_visible(device_spec("cpu"), "0")


def test_local_devices_of_a_cpu(no_accelerator):
    assert local_devices() == 0


def test_local_devices_asks_torch(torch_neuron):
    torch_neuron(3)
    assert local_devices() == 3


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 8),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, 16),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": "2", "NEURON_RT_NUM_CORES": "4"}, 1),
        ({"NEURON_RT_NUM_CORES": "4"}, 4),
        ({"NEURON_RT_NUM_CORES": "0"}, 8),
    ],
)
def test_local_devices_of_trainium_without_starting_its_runtime(install, add_chips, monkeypatch, environment, expected):
    install("2.14.3.0.1", native=True)
    add_chips(2)
    monkeypatch.setattr(torch.accelerator, "is_available", None)  # would raise if called
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_devices() == expected


def test_local_devices_refuses_an_illegal_set(install, add_chips, monkeypatch):
    install("2.14.3.0.1", native=True)
    add_chips(1)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "1,2")
    with pytest.raises(ValueError, match="cannot be used"):
        local_devices()

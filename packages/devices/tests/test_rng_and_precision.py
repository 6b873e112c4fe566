from types import SimpleNamespace

import pytest
import torch
from posttrain_devices import device_spec, rng_state, set_rng_state, supports_bf16


def test_cpu_state_round_trips_through_a_file(tmp_path):
    spec = device_spec("cpu")
    torch.manual_seed(3)
    torch.rand(5)
    torch.save(rng_state(spec), tmp_path / "rng.pt")
    expected = torch.rand(4), torch.randn(4)
    set_rng_state(spec, torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(torch.rand(4), expected[0]) and torch.equal(torch.randn(4), expected[1])


def test_every_core_of_neuron_is_saved_and_restored(torch_neuron):
    module = torch_neuron(3)
    spec = device_spec("neuron")
    states = rng_state(spec)
    assert len(states) == 3 and all(state.dtype == torch.uint8 and state.device.type == "cpu" for state in states)
    expected = [torch.rand(4, generator=generator) for generator in module.generators]
    assert not torch.equal(rng_state(spec)[0], states[0])  # a copy, not a view of the generator
    set_rng_state(spec, states)
    again = [torch.rand(4, generator=generator) for generator in module.generators]
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


def test_another_number_of_devices_is_refused(torch_neuron):
    torch_neuron(2)
    with pytest.raises(ValueError, match="states has 1 generator states, but this process sees 2 devices"):
        set_rng_state(device_spec("neuron"), rng_state(device_spec("cpu")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_states_round_trip():
    spec = device_spec("cuda")
    states = rng_state(spec)
    expected = [torch.rand(4, device=f"cuda:{index}") for index in range(len(states))]
    set_rng_state(spec, states)
    assert all(torch.equal(torch.rand(4, device=f"cuda:{i}"), expected[i]) for i in range(len(states)))


def test_neuron_has_bf16():
    assert supports_bf16(device_spec("neuron"))


@pytest.mark.parametrize(("avx512", "amx"), [(True, False), (False, True), (False, False)])
def test_x86(monkeypatch, avx512, amx):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert supports_bf16(device_spec("cpu")) == (avx512 or amx)


@pytest.mark.parametrize(("major", "expected"), [(7, False), (8, True), (9, True)])
def test_cuda_goes_by_capability_not_by_emulation(monkeypatch, major, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=major))
    assert supports_bf16(device_spec("cuda")) == expected


def test_an_absent_device_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not supports_bf16(device_spec("cuda"))

import json
import warnings

import posttrain_trainer.config as config_module
import pytest
from posttrain_devices import device_spec
from posttrain_trainer import TrainingConfig
from posttrain_trainer.config import checkpointing, checkpointing_kwargs


def make(tmp_path, **settings):
    return TrainingConfig(str(tmp_path), report_to="none", **{"use_cpu": True, **settings})


def test_defaults(tmp_path):
    args = make(tmp_path)
    assert args.logging_steps == 10 and args.pad_to_multiple_of == "auto" and args.max_shapes is None
    assert checkpointing(args) and args.gradient_checkpointing
    assert args.bf16 is False and args.remove_unused_columns is False and args.logging_nan_inf_filter is False


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("value", [True, False])
def test_both_names_of_checkpointing_work_without_noise(tmp_path, name, value):
    if name == "activation_checkpointing" and not config_module.RENAMED:
        pytest.skip("this transformers has no such name")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = make(tmp_path, **{name: value, "gradient_checkpointing_kwargs": {"use_reentrant": False}})
    assert checkpointing(args) is value and args.gradient_checkpointing is value
    assert checkpointing_kwargs(args) == {"use_reentrant": False}


@pytest.mark.parametrize(("written", "meant"), [("none", None), ("64", 64), (8, 8), (None, None), ("auto", "auto")])
def test_pad_to_multiple_of(tmp_path, written, meant):
    assert make(tmp_path, pad_to_multiple_of=written).pad_to_multiple_of == meant


def test_bf16_follows_the_device(tmp_path, monkeypatch):
    assert make(tmp_path, bf16=True).bf16 is True  # asked for on the CPU by name
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setattr(config_module, "supports_bf16", lambda spec: False)
    with pytest.raises(ValueError, match="bf16=True, but the .* here does not compute in bfloat16: write bf16=False"):
        make(tmp_path, use_cpu=False, bf16=True)
    monkeypatch.setattr(config_module, "supports_bf16", lambda spec: True)
    args = make(tmp_path)
    for spec, fp16, wanted in ((device_spec("neuron"), False, True), (device_spec("cuda"), True, False)):
        args.bf16, args.fp16 = None, fp16
        args._resolve_precision(spec)
        assert args.bf16 is wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"train_sampling_strategy": "batch_rebalance"}, "write one of random, sequential, group_by_length"),
        ({"max_shapes": 0}, "max_shapes=0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer=-1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"num_train_epochs": 0}, "num_train_epochs=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"pad_to_multiple_of": "wide"}, "pad_to_multiple_of='wide'"),
    ],
)
def test_what_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **settings)


def test_it_can_be_written_as_json(tmp_path):
    assert json.loads(make(tmp_path, pad_to_multiple_of=8).to_json_string())["pad_to_multiple_of"] == 8

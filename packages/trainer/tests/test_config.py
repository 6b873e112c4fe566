import json
import warnings
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import posttrain_trainer.config as config_module
import posttrain_trainer.settings as settings_module
import pytest
from posttrain_devices import device_spec
from posttrain_trainer import TrainingConfig
from posttrain_trainer.config import checkpointing, checkpointing_kwargs
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy


def make(tmp_path, **settings):
    return TrainingConfig(str(tmp_path), **{"report_to": "none", "use_cpu": True, **settings})


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
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"seed": -1}, "seed=-1: write a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"data_seed": -1}, "data_seed=-1"),
        ({"save_steps": 0}, "save_steps=0: write a number above 0.*save_strategy='no'"),
        ({"logging_steps": 0}, "logging_steps=0: write"),
        ({"logging_steps": -5}, "logging_steps=-5: write"),
        ({"eval_steps": 0}, "eval_steps=0: write"),
        ({"eval_steps": 0, "eval_strategy": "steps"}, "eval_steps=0: write"),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrnt": True}},
            "unknown key 'use_reentrnt': write some of .*selec",
        ),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": -1}}, "every_n_layers=-1"),
        ({"pad_to_multiple_of": "wide"}, "pad_to_multiple_of='wide'"),
    ],
)
def test_what_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **settings)


def test_the_largest_seed_and_an_interval_that_is_not_used_are_fine(tmp_path):
    args = make(tmp_path, seed=2**32 - 1, save_strategy="no", save_steps=0)
    assert args.seed == 2**32 - 1


@dataclass
class Options(TrainingConfig):
    loss_type: Literal["nll", "dft"] = "nll"
    weights: list[float] | None = None
    extra: dict[str, Any] | str | None = None
    size: int | None = None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_cpu": "no"}, "use_cpu='no': write True or False"),
        ({"bf16": 1}, "bf16=1: write True, False or None"),
        ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size='8': write a whole number"),
        ({"per_device_train_batch_size": 8.0}, "per_device_train_batch_size=8.0: write a whole number"),
        ({"size": True}, "size=True: write a whole number or None"),
        ({"learning_rate": "2e-5"}, "learning_rate='2e-5': write a number"),
        ({"loss_type": "mse"}, "loss_type='mse': write 'nll' or 'dft'"),
        ({"eval_strategy": False}, "eval_strategy=False: write 'no', 'steps' or 'epoch'"),
        ({"optim": "adamw"}, "optim='adamw': write 'adamw_torch', 'adamw_torch_fused'"),
        ({"optim": "zzz"}, "optim='zzz': write 'adamw_torch'"),
        ({"weights": [1.0, "2"]}, "weights=.*: write a list or None"),
        ({"label_names": "labels"}, "label_names='labels': write a list of text or None"),
        ({"extra": "{'a'"}, "extra=.* is not JSON .*character 2.*: write a mapping"),
        ({"extra": "[1]"}, "extra='.1.': write a mapping"),
        ({"extra": 5}, "extra=5: write a mapping, text or None"),
        ({"run_name": ["a" * 100]}, r"run_name=\['a+\.\.\.: write text"),
        ({"parallelism_config": 5}, "parallelism_config=5: write an object of ParallelismConfig or None"),
    ],
)
def test_values_of_the_wrong_type(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        Options(str(tmp_path), report_to="none", **{"use_cpu": True, **settings})


def test_values_that_are_as_good_as_the_annotated_type(tmp_path):
    args = Options(
        tmp_path,
        report_to="none",
        use_cpu=True,
        num_train_epochs=1,
        seed=np.int64(3),
        learning_rate=np.float32(0.5),
        weights=(1, 2.5),
        extra='{"a": 1}',
        eval_strategy="no",
        save_strategy=IntervalStrategy.EPOCH,
        resume_from_checkpoint=True,
        fsdp=None,
    )
    assert Options(**{item.name: getattr(args, item.name) for item in fields(args) if item.init}).seed == 3
    plain = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    TrainingConfig(**{item.name: getattr(plain, item.name) for item in fields(plain) if item.init})


def test_a_config_with_names_for_a_type_checker_alone(tmp_path):
    Local = dataclass(type("Local", (TrainingConfig,), {"__annotations__": {"other": "Nowhere"}, "other": None}))
    assert Local(str(tmp_path), use_cpu=True, report_to="none").other is None
    with pytest.raises(ValueError, match="seed='3'"):
        Local(str(tmp_path), use_cpu=True, report_to="none", seed="3")


# ---- What an option needs ----


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "flyte"])
def test_a_tracker_without_its_package(tmp_path, name, monkeypatch):
    monkeypatch.setattr(settings_module, "get_available_reporting_integrations", lambda: [])
    monkeypatch.setattr(settings_module, "UNLISTED", {"flyte": "no_such_module"})
    with pytest.raises(ValueError, match=f"report_to='{name}' needs the package {name}.*pip install.*report_to='none'"):
        make(tmp_path, report_to=name)
    with pytest.raises(ValueError, match=f"report_to='{name}'"):
        make(tmp_path, report_to=["all", name])


def test_trackers(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="report_to='wandbb': write none, all, or some of .*wandb"):
        make(tmp_path, report_to="wandbb")
    monkeypatch.setattr(settings_module, "get_available_reporting_integrations", lambda: ["wandb"])
    assert make(tmp_path, report_to="wandb").report_to == ["wandb"]


def test_deepspeed(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="deepspeed='x.json': there is no such file"):
        make(tmp_path, deepspeed="x.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="bad.json': the file is not JSON: .*line 1"):
        make(tmp_path, deepspeed=str(tmp_path / "bad.json"))
    monkeypatch.setattr(settings_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="deepspeed needs the package deepspeed: pip install deepspeed"):
        make(tmp_path, deepspeed={"zero_optimization": {"stage": 2}})


def test_the_hub_without_a_token_or_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(
        settings_module.hub, "build_hf_headers", lambda token: {"authorization": token} if token else {}
    )
    monkeypatch.setattr(settings_module.hub, "is_offline_mode", lambda: False)
    with pytest.raises(ValueError, match="push_to_hub=True, but there is no token.*HF_TOKEN.*push_to_hub=False"):
        make(tmp_path, push_to_hub=True)
    assert make(tmp_path, push_to_hub=True, hub_token="secret").push_to_hub
    monkeypatch.setattr(settings_module.hub, "is_offline_mode", lambda: True)
    with pytest.raises(ValueError, match="push_to_hub=True, but HF_HUB_OFFLINE is set"):
        make(tmp_path, push_to_hub=True, hub_token="secret")


def test_it_can_be_written_as_json(tmp_path):
    assert json.loads(make(tmp_path, pad_to_multiple_of=8).to_json_string())["pad_to_multiple_of"] == 8

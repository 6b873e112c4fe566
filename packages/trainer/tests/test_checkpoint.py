import errno
import json
import os
import random
import shutil
import time
from pathlib import Path

import posttrain_trainer.checkpoint as checkpoint
import pytest
import torch
import toy_jobs
import toy_runs
from posttrain_models import tiny_model
from posttrain_trainer.checkpoint import MANIFEST, tidy, writing
from posttrain_trainer.weights import check_weights
from safetensors.torch import load_file, save_file
from toy_jobs import StopAt
from toy_runs import logs, parameters, trainer
from transformers.trainer_utils import get_last_checkpoint

SETTINGS = {
    "count": 24,
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trainer(folder, **SETTINGS).train()
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def alone(value):
    return [value]


# ---- Whole or absent ----


def test_a_checkpoint_appears_whole(tmp_path):
    final = tmp_path / "checkpoint-1"
    with writing(final, writer=True, gather=alone) as folder:
        (folder / "a.txt").write_text("hello")
        (folder / "README.md").write_text("not listed")
        assert names(tmp_path) == [".incomplete-checkpoint-1"]
        assert get_last_checkpoint(str(tmp_path)) is None
    assert names(tmp_path) == ["checkpoint-1"]
    assert json.loads((final / MANIFEST).read_text())["files"] == {"a.txt": 5}


def test_files_are_flushed_before_the_rename(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(checkpoint, "flush", lambda path: order.append(path.name))
    real = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, target: (order.append("rename"), real(self, target))[1])
    with writing(tmp_path / "checkpoint-1", writer=True, gather=alone) as folder:
        (folder / "a.txt").write_text("hello")
    assert order.index("rename") > max(order.index("a.txt"), order.index(MANIFEST), order.index(folder.name))
    assert order[-1] == tmp_path.name


@pytest.mark.parametrize("moment", range(5))
def test_a_save_cut_short_at_any_rename_leaves_a_checkpoint(tmp_path, monkeypatch, moment):
    """An older checkpoint of the same step is replaced; the process stops at each operation in turn."""

    def save(text):
        with writing(tmp_path / "checkpoint-1", writer=True, gather=alone) as folder:
            (folder / "a.txt").write_text(text)

    save("old")
    calls = []

    class Cut(BaseException):
        pass

    def cut(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) > moment:
                raise Cut
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut(shutil.rmtree))
        patch.setattr(Path, "rename", cut(Path.rename))
        if moment < 5:
            try:
                save("new")
            except Cut:
                pass
    tidy(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "a.txt").read_text() in ("old", "new")
    checkpoint.read_json(tmp_path / "checkpoint-1" / MANIFEST)


def test_leftovers_are_removed_at_the_start(copy):
    shutil.copytree(copy / "checkpoint-12", copy / ".incomplete-checkpoint-14")
    shutil.copytree(copy / "checkpoint-12", copy / ".deleted-checkpoint-1")
    shutil.copytree(copy / "checkpoint-12", copy / "checkpoint-16")
    (copy / "checkpoint-16" / checkpoint.JIT_SENTINEL).touch()
    found = trainer(copy, **SETTINGS)
    found.train(resume_from_checkpoint=True)
    assert [name for name in names(copy) if "checkpoint" in name] == [f"checkpoint-{n}" for n in (10, 12, 2, 4, 6, 8)]
    assert found.state.global_step == 12


def test_rotation_keeps_the_last_and_the_best(tmp_path):
    data = toy_runs.rows(12, seed=4)
    found = trainer(
        tmp_path,
        **{**SETTINGS, "save_total_limit": 2, "learning_rate": 1.0, "eval_dataset": data, "eval_strategy": "steps"},
        eval_steps=2,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )
    found.train()
    kept = [name for name in names(tmp_path) if name.startswith("checkpoint")]
    assert "checkpoint-12" in kept and Path(found.state.best_model_checkpoint).name in kept and len(kept) <= 2
    state = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == found.state.best_model_checkpoint


# ---- A full disk ----


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError('Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space" })'),
    ],
)
@pytest.mark.parametrize("where", ["_save_optimizer_and_scheduler", "_save_rng_state", "save_model"])
def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch, where, error):
    found = trainer(tmp_path, **SETTINGS)
    real = getattr(found, where)

    def full(folder, *args, **kwargs):
        real(folder, *args, **kwargs)
        if found.state.global_step == 6:
            raise error

    monkeypatch.setattr(found, where, full)
    with pytest.raises(
        OSError, match=r"checkpoint-6 failed on rank 0: no space left.*earlier ones are intact"
    ) as caught:
        found.train()
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    resumed = trainer(tmp_path, **SETTINGS)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 12


def test_a_full_disk_at_the_flush_is_told_too(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(checkpoint, "flush", full)
    with pytest.raises(OSError, match="no space left"), writing(tmp_path / "c", writer=True, gather=alone) as folder:
        (folder / "a").touch()
    assert names(tmp_path) == []


def test_other_errors_are_raised_as_they_are(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path / "c", writer=True, gather=alone):
        raise KeyError("mine")
    assert names(tmp_path) == []


def test_an_error_on_another_rank_is_raised_here(tmp_path):
    rounds = iter([[None, None], [None, (True, "OSError: no space")]])
    with (
        pytest.raises(OSError, match="failed on rank 1: no space left"),
        writing(tmp_path / "c", writer=True, gather=lambda value: next(rounds)),
    ):
        pass
    assert names(tmp_path) == []


# ---- Damaged, or of another model ----


def refused(folder, message, **settings):
    found = trainer(folder, **{**SETTINGS, **settings})
    before = parameters(found)
    with pytest.raises(ValueError, match=message) as caught:
        found.train(resume_from_checkpoint=str(folder / "checkpoint-12"))
    assert "checkpoint-12" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(found), strict=True))


FILES = [
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "trainer_state.json",
    "rng_state.pth",
    "posttrain_state_0.pt",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "short"])
def test_a_damaged_file_is_named(copy, name, how):
    path = copy / "checkpoint-12" / name
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])
    refused(copy, f"{name} (is missing|has .* bytes instead)")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "posttrain_state_0.pt"])
def test_a_damaged_file_is_named_without_a_manifest_too(copy, name):
    (copy / "checkpoint-12" / MANIFEST).unlink()
    path = copy / "checkpoint-12" / name
    path.write_bytes(path.read_bytes()[:40])
    refused(copy, f"{name} (cannot be read|is not)")


def test_missing_without_a_manifest(copy):
    (copy / "checkpoint-12" / MANIFEST).unlink()
    (copy / "checkpoint-12" / "optimizer.pt").unlink()
    refused(copy, "optimizer.pt is missing")
    (copy / "checkpoint-12" / "model.safetensors").unlink()
    refused(copy, "model.safetensors is missing")


def test_a_checkpoint_of_another_model_is_named(copy):
    other = torch.nn.Sequential(torch.nn.Linear(toy_runs.WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    refused(copy, r"model.safetensors is of another model: 0.bias has shape \[16\], this model has \[8\]", model=other)
    longer = torch.nn.Sequential(*toy_runs.net(), torch.nn.Linear(1, 1))
    refused(copy, "tensor 4.bias is only in the model", model=longer)


def test_no_folder_and_no_checkpoint(tmp_path):
    found = trainer(tmp_path, **SETTINGS)
    with pytest.raises(ValueError, match="there is no such folder"):
        found.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    with pytest.raises(ValueError, match="has no checkpoint"):
        found.train(resume_from_checkpoint=True)


def test_configurations_are_compared(tmp_path):
    tiny_model("llama", vocab_size=32).save_pretrained(tmp_path)
    check_weights(tiny_model("llama", vocab_size=32, seed=3), tmp_path)
    with pytest.raises(ValueError, match="config.json is of another model: vocab_size is 32, this model has 40"):
        check_weights(tiny_model("llama", vocab_size=40), tmp_path)
    with pytest.raises(ValueError, match="model_type is 'llama', this model has 'qwen2'"):
        check_weights(tiny_model("qwen2", vocab_size=32), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    save_file({**weights, name: weights[name][:4]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.safetensors is of another model: .*q_proj"):
        check_weights(tiny_model("llama", vocab_size=32), tmp_path)


def test_adapters_are_compared(tmp_path):
    peft = pytest.importorskip("peft")

    def adapter(rank):
        config = peft.LoraConfig(r=rank, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny_model("llama", vocab_size=32), config)

    adapter(4).save_pretrained(tmp_path)
    check_weights(adapter(4), tmp_path)
    with pytest.raises(ValueError, match="adapter_config.json is of another model: r is 4, this model has 8"):
        check_weights(adapter(8), tmp_path)


def test_a_checkpoint_of_transformers_itself_resumes(copy, caplog):
    folder = copy / "checkpoint-6"
    for name in (MANIFEST, "posttrain_state_0.pt"):
        (folder / name).unlink()
    found = trainer(copy, **SETTINGS)
    found.train(resume_from_checkpoint=str(folder))
    assert found.state.global_step == 12


# ---- Killed while saving ----


def kill_while_saving(tmp_path, seed, times):
    """After each kill the newest checkpoint loads, and goes on bit for bit as a run that was never killed."""
    chance = random.Random(seed)
    (tmp_path / "cut").mkdir()
    for turn in range(times):
        (tmp_path / "ready").unlink(missing_ok=True)
        (process,) = toy_runs.start(1, "saving", tmp_path)
        while not (tmp_path / "ready").exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        while not list((tmp_path / "cut").glob("checkpoint-*")) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 0.5))
        process.kill()
        process.communicate()
        last = get_last_checkpoint(str(tmp_path / "cut"))
        end = int(last.rpartition("-")[2]) + 3
        settings = {**toy_jobs.SAVING, "save_strategy": "no", "callbacks": [StopAt(end)]}
        resumed = trainer(tmp_path / "cut", model=toy_runs.net(0.3, seed=9), **settings)
        resumed.train(resume_from_checkpoint=last)
        whole = trainer(tmp_path / f"whole-{turn}", **settings)
        whole.train()
        assert resumed.state.global_step == whole.state.global_step == end
        assert all(torch.equal(a, b) for a, b in zip(parameters(resumed), parameters(whole), strict=True))
        assert logs(resumed) == logs(whole)


def test_a_process_killed_while_saving_leaves_a_checkpoint(tmp_path):
    kill_while_saving(tmp_path, seed=int.from_bytes(os.urandom(2)), times=1)


@pytest.mark.slow
def test_many_processes_killed_while_saving_leave_checkpoints(tmp_path):
    kill_while_saving(tmp_path, seed=1, times=10)

"""DPO, KTO and reward models: 2N steps are N steps, a kill -9, a resumption, and N steps, through the command."""

import pytest
import torch
from app_command import SLOW_MODEL, assert_resumes, finish, log, save_model, save_rows, start, weights
from preference_runs import APPS

STEPS, KILLED = 14, 5  # the data is five and a half steps an epoch, and a log comes every third

SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2}  # the last move before the kill is one step old
ADAPTER = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.2, "disable_dropout": False, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Flags of a run of each app, whose rows are shuffled."""
    folder = tmp_path_factory.mktemp("jobs")
    common = {
        "model_name_or_path": save_model(folder / "model", "llama", **SLOW_MODEL),
        "max_steps": STEPS,
        "save_steps": KILLED,
        "logging_steps": 3,
        "learning_rate": 1e-4,
        "max_length": 64,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    return {app: {**common, "dataset_name": save_rows(folder / f"{app}.jsonl", APPS[app].rows(44))} for app in APPS}


# The apps' own tests resume in one process; a kill and new processes take a minute.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "changes"),
    [("dpo", SYNCED), ("dpo", ADAPTER), ("kto", {}), ("reward", {"center_rewards_coefficient": 0.1})],
    ids=["dpo synced", "dpo adapter", "kto", "reward"],
)
def test_a_killed_and_resumed_run_is_the_run_that_was_not(app, changes, jobs, tmp_path):
    assert_resumes(tmp_path, {**jobs[app], **changes}, killed=KILLED, app=app)


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("app", APPS)
def test_a_float16_run_resumes_with_its_scaler(app, jobs, tmp_path):
    """A scaler counts the steps since its scale last changed; one that started anew would have counted fewer."""
    options = {**jobs[app], "fp16": True, "nproc_per_node": 1, "lr_scheduler_type": "constant"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(start(whole, app=app, cpu=False, **options), whole)
    finish(start(cut, app=app, cpu=False, **{**options, "max_steps": KILLED}), cut)
    finish(start(cut, app=app, cpu=False, **options, resume_from_checkpoint=True), cut)
    ends = [torch.load(run / f"checkpoint-{STEPS}/scaler.pt", weights_only=True) for run in (whole, cut)]
    assert ends[0] == ends[1] and ends[0]["_growth_tracker"] > STEPS - KILLED
    one, other = weights(whole), weights(cut)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)
    assert [entry["loss"] for entry in log(whole, STEPS) if "loss" in entry] == pytest.approx(
        [entry["loss"] for entry in log(cut, STEPS) if "loss" in entry], rel=1e-3
    )

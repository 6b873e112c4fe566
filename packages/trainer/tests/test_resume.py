import shutil

import pytest
import torch
import toy_jobs
import toy_runs
from posttrain_trainer import BEMACallback
from toy_runs import Lonely, Stream10, logs, parameters, trainer


def check_resume(folder, stop, save_steps, before_resume=lambda: None, callbacks=list, **settings):
    """A run that stops after a step and goes on from its last checkpoint equals the whole run, bit for bit."""
    settings = {"dropout": 0.3, "logging_steps": 4, "save_strategy": "steps", "save_steps": save_steps, **settings}
    data = settings.pop("make_data", lambda: None)
    whole = trainer(folder / "whole", train_dataset=data(), callbacks=callbacks(), **settings)
    whole.train()
    cut = trainer(folder / "cut", train_dataset=data(), callbacks=[*callbacks(), toy_jobs.StopAt(stop)], **settings)
    cut.train()
    before_resume()
    torch.manual_seed(999)
    resumed = trainer(
        folder / "cut", train_dataset=data(), callbacks=callbacks(), model=toy_runs.net(0.3, seed=55), **settings
    )
    output = resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step
    for left, right in zip(parameters(whole), parameters(resumed), strict=True):
        assert torch.equal(left, right)
    assert logs(whole) == logs(resumed)
    assert output.training_loss == logs(whole)[-1]["train_loss"]
    return whole, resumed


SCHEDULES = [
    # rows, batch, accumulation, epochs, stop, save every
    (50, 2, 2, 2, 5, 5),  # in mid-epoch, a log window open
    (50, 2, 2, 2, 13, 13),  # at the end of an epoch, whose last step is short
    (48, 4, 2, 3, 8, 4),  # in the second epoch
    (50, 2, 4, 2, 9, 7),  # the last step of an epoch has fewer micro-batches; steps after the checkpoint are lost
    (10, 2, 1, 1, 5, 5),  # at the very end
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_is_the_whole_run(tmp_path, schedule):
    count, batch_size, accumulation, epochs, stop, save_steps = schedule
    check_resume(
        tmp_path,
        stop,
        save_steps,
        count=count,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
        lr_scheduler_type="cosine",
        warmup_steps=3,
    )


def test_epochs_and_steps_go_on_where_they_were(tmp_path):
    whole, resumed = check_resume(
        tmp_path,
        9,
        9,
        count=50,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        logging_steps=1,
    )
    assert [one["epoch"] for one in logs(resumed)][:-1] == pytest.approx([step / 7 for step in range(1, 15)])
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen


def test_a_source_of_the_users_own_resumes(tmp_path):
    check_resume(tmp_path, 3, 3, make_data=Lonely, max_steps=7, gradient_accumulation_steps=2)


def test_a_stream_resumes(tmp_path):
    check_resume(tmp_path, 3, 3, make_data=Stream10, max_steps=8, per_device_train_batch_size=3, shuffle_buffer=7)


def test_evaluation_and_the_best_checkpoint_resume(tmp_path):
    data = toy_runs.rows(12, seed=4)
    whole, resumed = check_resume(
        tmp_path,
        4,
        2,
        count=24,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        eval_dataset=data,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        save_total_limit=2,
    )
    best = resumed.state.best_model_checkpoint
    assert best == str(tmp_path / "cut" / f"checkpoint-{resumed.state.best_global_step}")
    assert (tmp_path / "cut" / f"checkpoint-{resumed.state.best_global_step}" / "trainer_state.json").exists()
    assert resumed.state.best_metric == whole.state.best_metric


def test_the_moving_average_resumes(tmp_path):
    def callbacks():
        return [BEMACallback(update_freq=2, update_after=1)]

    check_resume(tmp_path, 5, 5, count=24, per_device_train_batch_size=4, num_train_epochs=2, callbacks=callbacks)
    whole, resumed = (torch.load(tmp_path / name / "bema" / "pytorch_model.bin") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_moving_average_follows_its_formula(tmp_path):
    class Weights(toy_jobs.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.seen.append(next(model.parameters()).detach().double().clone())

    watch, average = Weights(), BEMACallback(update_freq=2, update_after=1, lag=3, multiplier=0.5, ema_power=0.4)
    trainer(tmp_path, count=28, per_device_train_batch_size=4, num_train_epochs=1, callbacks=[watch, average]).train()
    start = ema = watch.seen[0]
    for step in (3, 5, 7):
        now = watch.seen[step - 1]
        beta, alpha = (3 + 0.5 * step) ** -0.4, (3 + 0.5 * step) ** -0.2
        ema = (1 - beta) * ema + beta * now
        bema = ema + alpha * (now - start)
    torch.testing.assert_close(average.weights["0.weight"].double(), bema, rtol=1e-5, atol=1e-7)


def test_resuming_with_another_number_of_ranks_keeps_the_window(tmp_path):
    settings = {"count": 48, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    settings |= {"logging_steps": 4, "save_strategy": "steps", "save_steps": 6}
    cut = trainer(tmp_path / "cut", callbacks=[toy_jobs.StopAt(6)], **settings)
    cut.train()
    folder = tmp_path / "cut" / "checkpoint-6"
    state = torch.load(folder / "posttrain_state_0.pt")
    twice = {**state, "world": 2}
    for rank in (0, 1):
        torch.save(twice, folder / f"posttrain_state_{rank}.pt")
    (folder / "posttrain_manifest.json").unlink()
    resumed = trainer(tmp_path / "cut", **settings)
    resumed.train(resume_from_checkpoint=str(folder))
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    for left, right in zip(parameters(whole), parameters(resumed), strict=True):
        assert torch.equal(left, right)
    at_8 = next(one for one in logs(resumed) if one["step"] == 8)
    assert at_8["loss"] == pytest.approx(next(one for one in logs(whole) if one["step"] == 8)["loss"])


def test_another_batch_size_is_refused_and_ignore_data_skip_accepts_it(tmp_path):
    settings = {"count": 48, "save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    trainer(tmp_path, per_device_train_batch_size=4, callbacks=[toy_jobs.StopAt(2)], **settings).train()
    with pytest.raises(ValueError, match="global_batch=4, this run has global_batch=8"):
        trainer(tmp_path, per_device_train_batch_size=8, **settings).train(resume_from_checkpoint=True)
    found = trainer(tmp_path, per_device_train_batch_size=8, ignore_data_skip=True, **settings)
    found.train(resume_from_checkpoint=True)
    assert found.state.global_step == 8


def test_another_split_of_the_same_step_resumes(tmp_path):
    settings = {"count": 64, "save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
    trainer(tmp_path / "a", per_device_train_batch_size=8, callbacks=[toy_jobs.StopAt(3)], **settings).train()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ends = []
    for name, batch_size, accumulation in (("a", 8, 1), ("b", 2, 4)):
        found = trainer(
            tmp_path / name,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            **settings,
        )
        found.train(resume_from_checkpoint=True)
        ends.append(parameters(found))
    for left, right in zip(*ends, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-6)


def test_half_precision_scaler_state_is_saved(tmp_path):
    """fp16 needs an accelerator; a scaler is a state like others."""
    found = trainer(tmp_path, count=8, max_steps=2)
    found.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found.train()
    folder = tmp_path / "scaler"
    folder.mkdir()
    found.accelerator.scaler.update(new_scale=256.0)
    found._save_scaler(str(folder))
    found.accelerator.scaler.update(new_scale=2.0)
    found._load_scaler(str(folder))
    assert found.accelerator.scaler.get_scale() == 256.0


def test_state_of_a_source_must_be_plain(tmp_path):
    class Odd(Lonely):
        def state_dict(self):
            return {"taken": [self]}

    with pytest.raises(ValueError, match=r"state\['source'\]\['taken'\]\[0\] is of type Odd"):
        trainer(tmp_path, train_dataset=Odd(), max_steps=1, save_strategy="steps", save_steps=1).train()


@pytest.mark.slow
def test_two_killed_ranks_resume_bit_for_bit(tmp_path):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 5, "logging_steps": 4}
    for process in toy_runs.start(2, "killed", tmp_path, step=8, **settings):
        process.communicate(timeout=540)
        assert process.returncode
    both = toy_runs.run(2, "finished", tmp_path, **settings)
    whole, resumed = both["whole"], both["resumed"]
    for left, right in zip(whole["parameters"], resumed["parameters"], strict=True):
        assert torch.equal(left, right)
    assert whole["logs"] == resumed["logs"]

"""What other processes run: see `toy_runs.start`."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import toy_runs
from toy_runs import Prepared, Squares, logs, parameters, trainer
from transformers import TrainerCallback


class KillAt(TrainerCallback):
    """Kills the process, as a power cut would, when a step has ended."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def outcome(found):
    return {"parameters": parameters(found), "logs": logs(found)}


def split(folder, name, **settings):
    found = trainer(folder / name, **settings)
    found.train()
    return outcome(found)


def two_ranks(folder: Path):
    """All that needs two ranks, in one pair of processes."""
    results = {}
    for batch_size, accumulation in ((16, 1), (4, 4)):
        results[f"split {batch_size}x{accumulation}"] = split(
            folder,
            "s",
            count=75,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=2,
        )
    results["pairs"] = split(
        folder, "p", count=75, method=Squares(pairs=True), per_device_train_batch_size=4, gradient_accumulation_steps=4
    )
    results["prepared"] = split(
        folder, "q", count=75, method=Prepared(), per_device_train_batch_size=4, gradient_accumulation_steps=4
    )
    # 9 rows, 8 a step: the last step has one row for two ranks
    results["anchor"] = split(folder, "a", count=9, per_device_train_batch_size=4)
    results["lonely"] = split(folder, "l", count=12, method=Squares(lonely=True), per_device_train_batch_size=1)
    results["resume"] = resume(folder, save_steps=3)
    results["evaluation"] = evaluation(folder)
    results["late"] = late(folder)
    return results


def late(folder: Path):
    """What the first process says when the other one does not come; ends the group, which cannot be used any more."""
    ranks = trainer(folder / "late", count=4).ranks
    ranks.timeout = timedelta(seconds=1)
    said = None
    if ranks.index:
        time.sleep(2)
    else:
        try:
            ranks.exchange("here")
        except ValueError as error:
            said = str(error)
    torch.distributed.destroy_process_group()
    return said


def resume(folder: Path, **settings):
    """A run, and another that is cut off after a checkpoint and resumed."""
    settings = {
        "count": 50, "dropout": 0.3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "logging_steps": 4, "save_strategy": "steps", "save_total_limit": 2, **settings,
    }  # fmt: skip
    whole = trainer(folder / "whole", **settings)
    whole.train()
    cut = trainer(folder / "cut", callbacks=[StopAt(5)], **settings)
    cut.train()
    torch.manual_seed(123)
    resumed = trainer(folder / "cut", **settings)
    resumed.model.load_state_dict(toy_runs.net(seed=77).state_dict())
    resumed.train(resume_from_checkpoint=True)
    return {"whole": outcome(whole), "resumed": outcome(resumed)}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


def evaluation(folder: Path):
    results = {}
    for count in (1, 7):
        for method in (Squares(lonely=True), Prepared(pairs=True)):
            found = trainer(
                folder / "e",
                method=method,
                eval_dataset=toy_runs.rows(count, seed=8),
                per_device_eval_batch_size=2,
                compute_metrics=summed,
            )
            metrics = found.evaluate()
            prediction = found.predict(toy_runs.rows(count, seed=8))
            results[f"{count} {type(method).__name__}"] = (
                {name: value for name, value in metrics.items() if "per_second" not in name and "time" not in name},
                torch.tensor(prediction.predictions),
                torch.tensor(prediction.label_ids),
            )
    return results


def summed(prediction):
    real = prediction.label_ids != -100
    return {"sum": float(prediction.predictions[real].sum()), "items": int(real.sum())}


def killed(folder: Path, step: int, **settings):
    """Trains until it is killed at the beginning of a step."""
    settings = {"count": 50, "dropout": 0.3, "save_strategy": "steps", "num_train_epochs": 2, **settings}
    trainer(folder / "cut", callbacks=[KillAt(step)], **settings).train()


def finished(folder: Path, **settings):
    """What `killed` left, resumed; and the same run without an interruption."""
    settings = {"count": 50, "dropout": 0.3, "save_strategy": "steps", "num_train_epochs": 2, **settings}
    resumed = trainer(folder / "cut", model=toy_runs.net(0.3, seed=99), **settings)
    resumed.train(resume_from_checkpoint=True)
    whole = trainer(folder / "whole", **settings)
    whole.train()
    return {"whole": outcome(whole), "resumed": outcome(resumed)}


SAVING = {"count": 50, "dropout": 0.3, "num_train_epochs": 10000, "logging_steps": 4, "per_device_train_batch_size": 4}
SAVING |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}


def saving(folder: Path):
    """Saves in every step, for ever; somebody else kills it."""
    found = trainer(folder / "cut", **SAVING)
    (folder / "ready").touch()
    found.train(resume_from_checkpoint=True if list((folder / "cut").glob("checkpoint-*")) else None)


def sharded(folder: Path):
    """A model that transformers shards at load time (FSDP2)."""
    from posttrain_models import tiny_model
    from test_language import language
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 0:
        tiny_model("llama", vocab_size=32).save_pretrained(folder / "base")
    torch.distributed.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype="float32", distributed_config=DistributedConfig(fsdp_size=2)
    )
    found = language(
        folder / "run", model, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1.0
    )
    found.train()
    return {"logs": logs(found), "eval": found.evaluate()["eval_loss"]}

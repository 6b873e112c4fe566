"""Short runs of the preference methods on a tiny model, in this process and on two.

As a program (`python preference_runs.py FOLDER`, once for each rank) it runs `TOGETHER` and saves what rank 0 found.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from app_command import words
from posttrain_data import tiny_tokenizer
from posttrain_dpo import DPOConfig, DPOTrainer
from posttrain_dpo.config import LOSSES as DPO_LOSSES
from posttrain_kto import KTOConfig, KTOTrainer
from posttrain_kto.config import LOSSES as KTO_LOSSES
from posttrain_models import LoraOptions, tiny_model, unwrap
from posttrain_models.rewards import tiny_reward_model
from posttrain_reward import RewardConfig, RewardTrainer
from posttrain_sft import SFTConfig, SFTTrainer
from transformers import TrainerCallback

STEP, ROWS = 8, 21  # the third step of an epoch is short, and odd
TIMES = ("runtime", "per_second", "total_flos")


def pairs(count: int = ROWS) -> list[dict]:
    """Pairs of many lengths; the longer side is now the chosen and now the rejected one."""
    return [
        {
            "prompt": f"After {words(row, 1 + row % 4)}:",
            "chosen": " " + words(row + 1, 1 + row % 5),
            "rejected": " " + words(row + 2, 1 + (row * 3) % 7),
        }
        for row in range(count)
    ]


def margins(count: int = ROWS) -> list[dict]:
    return [{**row, "margin": 0.25 * (number % 3)} for number, row in enumerate(pairs(count))]


def feedback(count: int = ROWS) -> list[dict]:
    return [
        {"prompt": row["prompt"], "completion": row["rejected"], "label": number % 3 != 1}
        for number, row in enumerate(pairs(count))
    ]


def texts(count: int = ROWS) -> list[dict]:
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(count)]


class App(NamedTuple):
    config: type
    trainer: type
    rows: Any


APPS = {
    "dpo": App(DPOConfig, DPOTrainer, pairs),
    "kto": App(KTOConfig, KTOTrainer, feedback),
    "reward": App(RewardConfig, RewardTrainer, margins),
}

# Other methods, for what every method must do.
METHODS = {**APPS, "sft": App(SFTConfig, SFTTrainer, texts)}

# Losses that compare the rows of a micro-batch with each other: the only ones that depend on how a step is dealt.
COUPLED = ("aot", "aot_unpaired")


class Job(NamedTuple):
    app: str
    options: dict[str, Any]
    adapter: bool = False


JOBS = {
    **{f"dpo {name}": Job("dpo", {"loss_type": [name]}) for name in DPO_LOSSES if name not in COUPLED},
    "dpo exo_pair": Job("dpo", {"loss_type": ["exo_pair"], "label_smoothing": 0.01}),
    "dpo sppo_hard": Job("dpo", {"loss_type": ["sppo_hard"], "learning_rate": 2e-4}),  # its gradients are large
    "dpo of three": Job("dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    "dpo ld_alpha": Job("dpo", {"ld_alpha": 0.5}),
    "dpo use_weighting": Job("dpo", {"use_weighting": True}),
    "dpo checkpointing": Job("dpo", {"gradient_checkpointing": True}),
    **{f"{app} adapter": Job(app, {"learning_rate": 0.2}, adapter=True) for app in APPS},
    **{f"kto {name}": Job("kto", {"loss_type": name, "undesirable_weight": 1.3}) for name in KTO_LOSSES},
    "reward": Job("reward", {"center_rewards_coefficient": 0.3}),
}
# Those that two processes run together; those that they evaluate; those whose reference they compute beforehand.
EVALUATED = ("dpo sigmoid", "dpo of three", "kto kto", "kto apo_zero_unpaired", "reward")
TOGETHER = (*EVALUATED, "dpo checkpointing", *(f"{app} adapter" for app in APPS))
PRECOMPUTED = ("dpo sigmoid", "kto kto", "dpo adapter")
HELD_OUT = (11, 9)  # in batches of two: on two processes the last is short, or comes to one process alone


def config(app: str, folder: Path, **changes: Any) -> Any:
    """Plain gradient descent at a visible rate, every step logged, nothing saved."""
    settings = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": STEP,
        "per_device_eval_batch_size": 2,
        "max_length": 64,
        "log_level": "error",
    }
    return METHODS[app].config(**{**settings, **changes})


def model(app: str, seed: int = 0) -> Any:
    make = tiny_reward_model if app == "reward" else tiny_model
    return make("llama", vocab_size=len(tiny_tokenizer()), seed=seed)


def trainer(app: str, folder: Path, *, extras: dict | None = None, rows: Any = None, policy: Any = None, **changes):
    """A trainer of a tiny llama, unless a model is given; `extras` are the constructor's other arguments."""
    return METHODS[app].trainer(
        model=model(app) if policy is None else policy,
        args=config(app, folder, **changes),
        train_dataset=METHODS[app].rows() if rows is None else rows,
        processing_class=tiny_tokenizer(),
        **(extras or {}),
    )


def other_reference(app: str) -> dict[str, Any]:
    """A reference that is not the policy, where there is one."""
    return {} if app == "reward" else {"ref_model": model(app, seed=1)}


def extras_of(job: Job) -> dict[str, Any]:
    """A small adapter, whose reference is the model without it; or else another reference."""
    return {"peft_config": LoraOptions(use_peft=True, lora_r=4)} if job.adapter else other_reference(job.app)


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.first:
            self.first = {name: value.grad.clone() for name, value in unwrap(model).named_parameters()}


class Outcome(NamedTuple):
    log: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def outcome(made: Any) -> Outcome:
    """What a trainer logged, without how long it took, and the weights it has now."""
    weights = {name: value.detach().clone() for name, value in unwrap(made.model).named_parameters()}
    return Outcome([timeless(entry) for entry in made.state.log_history], weights)


def timeless(entry: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if not name.endswith(TIMES)}


def run(name: str, folder: Path, size: int, accumulation: int, **changes: Any) -> Outcome:
    """A job of `JOBS`, three steps."""
    job = JOBS[name]
    split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    made = trainer(job.app, folder, extras=extras_of(job), **{**job.options, **split, **changes})
    made.train()
    return outcome(made)


def evaluated(name: str, folder: Path, count: int) -> dict[str, float]:
    job = JOBS[name]
    made = trainer(job.app, folder, extras=extras_of(job), **job.options)
    return timeless(made.evaluate(APPS[job.app].rows(count)))


def evaluations(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    return {(name, count): evaluated(name, folder, count) for name in EVALUATED for count in HELD_OUT}


def on_two_processes(folder: Path) -> dict[str, Any]:
    """What this file finds as a program, on two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HOME": str(folder / "cache")}
    processes, files = [], [folder / f"rank{rank}.log" for rank in range(2)]
    for rank, file in enumerate(files):
        with file.open("w") as said:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(folder)],
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = [process.wait(timeout=400) for process in processes]
    assert codes == [0, 0], "\n".join(file.read_text()[-3000:] for file in files)
    found = torch.load(folder / "found.pt", weights_only=True)
    for kind in ("steps", "precomputed"):
        found[kind] = {job: Outcome(*parts) for job, parts in found[kind].items()}
    return found


def main() -> None:
    torch.distributed.init_process_group("gloo")
    folder = Path(sys.argv[1])
    found = {
        # Eight rows a step, whatever the split: four or one a process and micro-batch.
        "steps": {(name, size): tuple(run(name, folder, size, 4 // size)) for name in TOGETHER for size in (4, 1)},
        "precomputed": {name: tuple(run(name, folder, 4, 1, precompute_ref_log_probs=True)) for name in PRECOMPUTED},
        "evaluations": evaluations(folder),
    }
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""A toy method on ragged rows, and runs of it in this process, in a killed one, and on two ranks."""

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from posttrain_losses import Max, Mean, Std
from posttrain_trainer import Anchor, Trainer, TrainingConfig
from torch import nn
from transformers import TrainerCallback  # noqa: F401 (for the tests)

HERE = Path(__file__).parent
WIDTH = 6


class Toy(NamedTuple):
    x: torch.Tensor  # (B, T, WIDTH)
    y: torch.Tensor  # (B, T)
    mask: torch.Tensor  # (B, T)
    extra: Any = None


def rows(count: int, seed: int = 0) -> list[dict]:
    """Rows with 1 to 5 items each."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = int(torch.randint(1, 6, (), generator=generator))
        x = torch.randn(length, WIDTH, generator=generator)
        found.append({"index": index, "x": x, "y": x.sum(1).tanh(), "length": length})
    return found


def collate(batch: list[dict], size: int | None = None) -> Toy:
    longest = max(row["length"] for row in batch)
    size = size or len(batch)
    x, y = torch.zeros(size, longest, WIDTH), torch.zeros(size, longest)
    mask = torch.zeros(size, longest, dtype=torch.bool)
    for number, row in enumerate(batch):
        x[number, : row["length"]], y[number, : row["length"]] = row["x"], row["y"]
        mask[number, : row["length"]] = True
    return Toy(x, y, mask)


class Squares:
    """Squared errors over all items; `pairs` adds a second key, averaged over rows."""

    def __init__(self, pairs: bool = False, lonely: bool = False):
        self.pairs, self.lonely = pairs, lonely

    def count(self, batch):
        items = batch.mask.sum()
        return {"items": items, "rows": batch.mask.any(1).sum()} if self.pairs else items

    def tokens(self, batch):
        return batch.mask.sum()

    def loss(self, model, batch):
        error = (model(batch.x).squeeze(-1) - batch.y) ** 2 * batch.mask
        metrics = {
            "error": Mean.of(error, batch.mask),
            "worst": Max.of(error, batch.mask),
            "spread": Std.of(batch.y, batch.mask),
        }
        if self.lonely and int(batch.mask.sum()) == 5:
            metrics["odd"] = Mean.of(1.0)
        if self.pairs:
            return {"items": error.sum(), "rows": error.amax(1).sum()}, metrics
        return error.sum(), metrics

    def predict(self, model, batch):
        return model(batch.x).squeeze(-1), torch.where(batch.mask, batch.y, -100.0)


class Prepared(Squares):
    """Its loss needs the mean target of the whole step, which `prepare` adds."""

    def prepare(self, model, batches):
        real = [batch for batch in batches if not isinstance(batch, Anchor)]
        sums = [sum(float((b.y * b.mask).sum()) for b in real), sum(float(b.mask.sum()) for b in real)]
        total = torch.tensor(sums, dtype=torch.float64)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        mean = (total[0] / total[1]).float()

        def add(batch):
            return Anchor(add(batch.batch)) if isinstance(batch, Anchor) else batch._replace(extra=mean)

        return [add(batch) for batch in batches]

    def loss(self, model, batch):
        return super().loss(model, batch._replace(y=batch.y - batch.extra))


class Lonely:
    """A user's own source: one batch of rows and one anchor a step."""

    def __init__(self):
        self.taken = 0

    def __iter__(self):
        while True:
            self.taken += 1
            batch = collate(rows(4, seed=self.taken))
            yield batch
            yield Anchor(collate(rows(2, seed=1000 + self.taken)))

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Stream10:
    def __iter__(self):
        return iter(rows(10))


def net(dropout: float = 0.0, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def config(folder: Any, **overrides: Any) -> TrainingConfig:
    settings = {
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 0.02,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
        "log_level": "error",
    }
    if os.environ.get("WORLD_SIZE"):
        settings["ddp_backend"] = "gloo"
    return TrainingConfig(str(folder), **{**settings, **overrides})


def trainer(folder: Any, *, count: int = 50, dropout: float = 0.0, method: Any = None, **overrides: Any) -> Trainer:
    """A trainer of the toy; `method` and the rest as given."""
    special = {
        name: overrides.pop(name)
        for name in (
            "callbacks", "eval_dataset", "compute_metrics", "preprocess_logits_for_metrics", "shape_plan",
            "processing_class",
        )
        if name in overrides
    }  # fmt: skip
    data = overrides.pop("train_dataset", None) or rows(count)
    return Trainer(
        overrides.pop("model", None) or net(dropout),
        method or Squares(),
        overrides.pop("args", None) or config(folder, **overrides),
        collate,
        train_dataset=data,
        **special,
    )


def parameters(found: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in found.model.parameters()]


def logs(found: Trainer) -> list[dict]:
    """The log without times."""
    hidden = ("runtime", "per_second", "total_flos")
    return [{k: v for k, v in one.items() if not k.endswith(hidden)} for one in found.state.log_history]


# ---- Other processes ----


def start(world: int, job: str, folder: Path, **settings: Any) -> list[subprocess.Popen]:
    """Runs `job` (a function of this module) in `world` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for rank in range(world):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        if world > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, job, str(folder), json.dumps(settings)]
        found.append(subprocess.Popen(command, env=env, cwd=folder, stderr=subprocess.PIPE, text=True))
    return found


def finish(processes: list[subprocess.Popen], timeout: float = 540) -> None:
    errors = []
    for process in processes:
        _, error = process.communicate(timeout=timeout)
        if process.returncode:
            errors.append(error)
    assert not errors, "\n".join(errors)


def run(world: int, job: str, folder: Path, **settings: Any) -> Any:
    """The result that rank 0 of a job saved."""
    finish(start(world, job, folder, **settings))
    return torch.load(folder / f"{job}.pt", weights_only=False)


def main() -> None:
    sys.path.insert(0, str(HERE))
    import toy_jobs

    torch.set_num_threads(1)
    gc.freeze()
    job, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    result = getattr(toy_jobs, job)(folder, **settings)
    if os.environ.get("RANK", "0") == "0":
        torch.save(result, folder / f"{job}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

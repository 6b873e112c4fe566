"""Short runs on tiny reward models, and what they are compared with."""

import copy
from pathlib import Path
from typing import Any

import torch
from posttrain_models import tiny_model, unwrap
from posttrain_models.rewards import tiny_reward_model
from posttrain_reward import RewardConfig, RewardTrainer

WORDS = "river mountain house garden music paper winter summer yellow stone bridge window".split()


def saved(folder: Path, architecture: str, tokenizer) -> Path:
    """A folder with a tiny language model of an architecture and its tokenizer."""
    tiny_model(architecture, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first + n) % len(WORDS)] for n in range(count))


def texts(count: int = 12) -> list[dict]:
    """Pairs of strings, prompts and completions each of another length."""
    return [
        {
            "prompt": words(row, 1 + row % 5),
            "chosen": " " + words(row + 3, 1 + row % 4),
            "rejected": " " + words(row + 7, 1 + row % 3),
        }
        for row in range(count)
    ]


def chats(count: int = 8) -> list[dict]:
    """Pairs of answers to one question."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What comes after {WORDS[row % 12]}?"}],
            "chosen": [{"role": "assistant", "content": words(row + 1, 1 + row % 4)}],
            "rejected": [{"role": "assistant", "content": words(row + 5, 2)}],
        }
        for row in range(count)
    ]


def config(**changes: Any) -> RewardConfig:
    """Plain gradient descent at a visible rate, every step logged, nothing saved."""
    settings = {
        "output_dir": "out",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 1,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 4,
        "max_length": 64,
        "log_level": "error",
    }
    return RewardConfig(**{**settings, **changes})


def trainer(rows: Any, tokenizer: Any, model: Any = None, *, extras: dict | None = None, **changes: Any):
    """A trainer on a fresh tiny llama unless a model is given; `extras` are the constructor's other arguments."""
    if model is None:
        model = tiny_reward_model("llama", vocab_size=len(tokenizer))
    args = config(**changes)
    return RewardTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **(extras or {}))


def logged(made: RewardTrainer, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def losses(made: RewardTrainer) -> list[float]:
    return logged(made, "loss")


def parameters(made: Any) -> dict[str, torch.Tensor]:
    """A copy of every parameter, of a trainer's model or of a model."""
    model = unwrap(getattr(made, "model", made))
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(one: dict, other: dict, tolerance: float = 2e-6) -> None:
    """Equal names and, to the tolerance (absolute), equal values; 0 means bit for bit."""
    assert one.keys() == other.keys()
    gaps = {name: float((one[name] - other[name]).abs().max()) for name in one}
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= tolerance, f"{worst} differs by {gaps[worst]}"


def step_gradient(before: dict, after: dict, rate: float = 0.5) -> dict[str, torch.Tensor]:
    """The gradient that a step of plain gradient descent took."""
    return {name: (before[name].double() - after[name].double()) / rate for name in before}


def rewards(model: Any, rows: Any) -> torch.Tensor:
    """Rewards `(N, 2)` of prepared pairs, one sequence at a time, without padding, at the last token."""
    decoder = getattr(model, model.base_model_prefix)
    found = []
    for row in rows:
        for side in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([[*(row.get("prompt_ids") or []), *row[side]]])
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
            found.append(model.score(hidden[0, -1])[0])
    return torch.stack(found).view(-1, 2)


class Reference:
    """The loss of one optimiser step in float64, one sequence at a time, its metrics, and its gradient."""

    def __init__(self, model: Any, rows: Any, center: float = 0.0):
        model = copy.deepcopy(unwrap(model)).double().eval()
        model.set_attn_implementation("eager")
        rows = list(rows)
        found = rewards(model, rows)
        chosen, rejected = found.unbind(1)
        margins = torch.tensor([row.get("margin") or 0.0 for row in rows], dtype=torch.float64)
        odds = 1 / (1 + torch.exp(-(chosen - rejected - margins)))
        loss = (-odds.log() + center * (chosen + rejected) ** 2).mean()
        loss.backward()
        self.loss = float(loss.detach())
        self.metrics = {
            "accuracy": float((chosen > rejected).double().mean()),
            "margin": float((chosen - rejected).mean().detach()),
            "mean_reward": float(found.mean().detach()),
            "min_reward": float(found.min().detach()),
            "max_reward": float(found.max().detach()),
        }
        self.tokens = sum(
            len(row.get("prompt_ids") or []) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows
        )
        self.gradient = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in model.named_parameters()
        }

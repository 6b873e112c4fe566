"""Short runs on tiny reward models, and what they are compared with."""

import copy
from typing import Any

import torch
from app_runs import SETTINGS, WORDS
from posttrain_models import unwrap
from posttrain_models.rewards import tiny_reward_model
from posttrain_reward import RewardConfig, RewardTrainer


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
    return RewardConfig(**{**SETTINGS, **changes})


def trainer(rows: Any, tokenizer: Any, model: Any = None, *, extras: dict | None = None, **changes: Any):
    """A trainer on a fresh tiny llama unless a model is given; `extras` are the constructor's other arguments."""
    if model is None:
        model = tiny_reward_model("llama", vocab_size=len(tokenizer))
    args = config(**changes)
    return RewardTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **(extras or {}))


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

"""Short runs on tiny models, and what they are compared with."""

from typing import Any

import torch
from app_runs import SETTINGS, WORDS
from posttrain_models import tiny_model
from posttrain_sft import SFTConfig, SFTTrainer
from transformers import TrainerCallback


def texts(count: int = 12) -> list[dict]:
    """Rows of plain text, each of another length."""
    return [{"text": " ".join(WORDS[(row * 5 + n) % len(WORDS)] for n in range(2 + row % 7))} for row in range(count)]


def chats(count: int = 8) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"What comes after {WORDS[row % 12]}?"},
                {"role": "assistant", "content": " ".join(WORDS[row % 12 : row % 12 + 1 + row % 4])},
            ]
        }
        for row in range(count)
    ]


def pairs(count: int = 8) -> list[dict]:
    return [
        {"prompt": f"{WORDS[row % 12]} is", "completion": " " + " ".join(WORDS[: 1 + row % 5])} for row in range(count)
    ]


def config(**changes: Any) -> SFTConfig:
    """Plain gradient descent at a visible rate, every step logged, nothing saved."""
    return SFTConfig(**{**SETTINGS, **changes})


def trainer(rows: Any, tokenizer: Any, model: Any = None, *, extras: dict | None = None, **changes: Any) -> SFTTrainer:
    """A trainer on a fresh tiny llama unless a model is given; `extras` are the constructor's other arguments."""
    if model is None:
        model = tiny_model("llama", vocab_size=len(tokenizer))
    args = config(**changes)
    return SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **(extras or {}))


class Reference:
    """The loss of one optimiser step from full float64 logits, one sequence at a time, and its gradient."""

    def __init__(self, model: Any, sequences: list[tuple[list[int], list[bool]]], dft: bool = False):
        import copy

        model = copy.deepcopy(model).double().train()
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        total, count, entropy, right = 0.0, 0, 0.0, 0
        for ids, mask in sequences:
            logits = model(torch.tensor([ids])).logits[0, :-1]
            logps = logits.log_softmax(-1)
            chosen = logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            wanted = torch.tensor(mask[1:], dtype=torch.float64)
            weight = wanted * chosen.detach().exp() if dft else wanted
            total = total - (weight * chosen).sum()
            count += int(wanted.sum())
            entropy += float((-(logps.exp() * logps).sum(-1) * wanted).sum().detach())
            right += int(((logits.argmax(-1) == torch.tensor(ids[1:])) & (wanted > 0)).sum())
        loss = total / count
        loss.backward()
        self.loss, self.count = float(loss.detach()), count
        self.entropy, self.accuracy = entropy / count, right / count
        self.tokens = sum(len(ids) for ids, _ in sequences)
        self.gradient = {name: value.grad for name, value in model.named_parameters()}


def prepared(made: SFTTrainer) -> list[tuple[list[int], list[bool]]]:
    """The sequences of a trainer's prepared rows, packed ones taken apart."""
    found = []
    for row in made.train_dataset:
        at = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            mask = row["loss_mask"][at : at + length]
            found.append((row["input_ids"][at : at + length], [False, *mask[1:]]))
            at += length
    return found


def targets(tokenizer: Any, row: dict) -> str:
    """The text of a prepared row's targets."""
    return tokenizer.decode([token for token, kept in zip(row["input_ids"], row["loss_mask"], strict=True) if kept])


class Grads(TrainerCallback):
    """Remembers the norm of the gradient before every step."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.norms.append(float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()))

"""Short runs on tiny models, and what they are compared with."""

import copy
from pathlib import Path
from typing import Any

import torch
from posttrain_kto import KTOConfig, KTOTrainer
from posttrain_models import tiny_model, unwrap

WORDS = "river mountain house garden music paper winter summer yellow stone bridge window".split()


def saved(folder: Path, architecture: str, tokenizer) -> Path:
    """A folder with a tiny model of an architecture and its tokenizer."""
    tiny_model(architecture, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def words(start: int, count: int) -> str:
    return " ".join(WORDS[(start * 5 + n) % len(WORDS)] for n in range(count))


def feedback(count: int = 8) -> list[dict]:
    """Completions of many lengths, good and bad in turn."""
    return [
        {
            "prompt": f"After {words(row, 1 + row % 4)}:",
            "completion": " " + words(row + 1, 1 + (row * 3) % 7),
            "label": row % 2 == 0,
        }
        for row in range(count)
    ]


def config(**changes: Any) -> KTOConfig:
    """Plain gradient descent at a visible rate, every step logged, nothing saved."""
    settings = {
        "output_dir": "out",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 4,
        "max_length": 64,
        "log_level": "error",
    }
    return KTOConfig(**{**settings, **changes})


def trainer(rows: Any, tokenizer: Any, model: Any = None, *, extras: dict | None = None, **changes: Any) -> KTOTrainer:
    """A trainer on a fresh tiny llama unless a model is given; `extras` are the constructor's other arguments."""
    if model is None:
        model = tiny_model("llama", vocab_size=len(tokenizer))
    args = config(**changes)
    return KTOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, **(extras or {}))


def logged(made: KTOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def parameters(made: Any) -> dict[str, torch.Tensor]:
    """A copy of every parameter, of a trainer's model or of a model."""
    model = unwrap(getattr(made, "model", made))
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(one: dict, other: dict, tolerance: float = 2e-6) -> None:
    """Equal names and, to the tolerance (absolute), equal values."""
    assert one.keys() == other.keys()
    gaps = {name: float((one[name] - other[name]).abs().max()) for name in one}
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= tolerance, f"{worst} differs by {gaps[worst]}"


def plain_logps(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probabilities of the completion's tokens from full float64 logits, one sequence at a time."""
    ids = torch.tensor([[*prompt, *completion]])
    logps = model(ids).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, ids[0, 1:, None])[-len(completion) :, 0]


def double(model: Any) -> Any:
    model = copy.deepcopy(unwrap(model)).double().eval()
    model.set_attn_implementation("eager")
    return model

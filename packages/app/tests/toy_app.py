"""An app as small as can be: sampled answers become likelier, or less likely, as they are labelled."""

from dataclasses import dataclass
from typing import Any

from posttrain_app import AppTrainer, Demonstration, LanguageConfig, TemplateConfig
from posttrain_collators import FeedbackCollator
from posttrain_data import prepare_feedback, tiny_tokenizer
from posttrain_models import completion_logps, tiny_model

ROWS = [{"prompt": f"{n}+{n} is", "completion": f" {2 * n}", "label": n % 3 > 0} for n in range(8)]


@dataclass
class ToyConfig(LanguageConfig, TemplateConfig):
    disable_dropout: bool = True


@dataclass(frozen=True)
class Toy:
    coefficient: float

    def count(self, batch):
        return batch.completion_mask.any(-1).sum()

    def loss(self, model, batch):
        sign = batch.extras.labels * 2 - 1  # (P,)
        return -(sign * completion_logps(model, batch).sum((1, 2))).sum(), {}


class ToyTrainer(AppTrainer):
    config_class, collator_class, num_completions = ToyConfig, FeedbackCollator, 1
    asked: list[tuple[int, str, str]] = []

    def prepare(self, dataset, name, use):
        self.asked.append((len(dataset), name, use))
        return prepare_feedback(dataset, self.processing_class, name=name)

    def make_method(self, plan, coefficient):
        return Toy(coefficient)


DEMONSTRATION = Demonstration(
    rows=ROWS,
    settings={"max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True},
    held_out=2,
    look=lambda trainer: trainer.evaluate()["eval_loss"],
    compare=lambda before, after: {"held out": "as before" if after == before else "changed"},
)


def config(folder: Any, **options: Any) -> ToyConfig:
    return ToyConfig(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **options)


def trainer(folder: Any, *, model: Any = None, extras: dict | None = None, **options: Any) -> ToyTrainer:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer)) if model is None else model
    args = config(folder, **options)
    return ToyTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer, **(extras or {}))


def saved(folder: Any, architecture: str = "llama") -> str:
    """A tiny model and its tokenizer."""
    tokenizer = tiny_tokenizer()
    tiny_model(architecture, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

"""What a command does when it is given nothing: a built-in tiny model learns built-in rows."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from posttrain_data import tiny_tokenizer
from posttrain_models import tiny_model
from transformers import set_seed

from posttrain_app.trainer import AppTrainer

COUNTRIES = (
    "Austria", "Chile", "Cuba", "Egypt", "France", "Ghana", "Greece", "Ireland", "Italy", "Japan", "Kenya", "Norway",
    "Peru", "Poland", "Qatar", "Spain",
)  # fmt: skip
SETTINGS = {"lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none"}


@dataclass(frozen=True)
class Demonstration:
    """A run of seconds that shows what a method does.

    Attributes:
        rows: The rows, raw.
        settings: What suits the tiny model and these rows, besides what suits every demonstration.
        held_out: How many of the last rows are evaluated on instead of trained on.
        look: What the trainer shows before and after training.
        compare: What to print of the two, by name.
        architecture: Makes the model: `tiny_model` or another one with its arguments.
    """

    rows: Sequence[dict[str, Any]]
    settings: Mapping[str, Any]
    held_out: int = 0
    look: Callable[[Any], Any] = lambda trainer: None
    compare: Callable[[Any, Any], dict[str, str]] = lambda before, after: {}
    architecture: Callable[..., Any] = tiny_model

    def tiny(self, tokenizer: Any) -> Any:
        """The model, with random weights."""
        return self.architecture("llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256)

    def run(self, trainer_class: type[AppTrainer], config: Any) -> int:
        """Train, and print the losses on the way and what changed; returns the exit code.

        Args:
            trainer_class: The app's trainer.
            config: What the command line said; what it left at its default is as `settings` say.
        """
        split = len(self.rows) - self.held_out
        with demonstration(config, {**SETTINGS, **self.settings}) as config:
            set_seed(config.seed)
            tokenizer = tiny_tokenizer()
            trainer = trainer_class(
                model=self.tiny(tokenizer),
                args=config,
                train_dataset=self.rows[:split],
                eval_dataset=self.rows[split:] or None,
                processing_class=tokenizer,
            )
            before = self.look(trainer)
            trainer.train()
            after = self.look(trainer)
        if trainer.is_world_process_zero():
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            said = {"loss": " -> ".join(f"{loss:.3f}" for loss in losses), **self.compare(before, after)}
            width = max(map(len, said))
            print("", *(f"{name:<{width}}  {text}" for name, text in said.items()), sep="\n", flush=True)
        return 0


@contextmanager
def demonstration(config: Any, settings: Mapping[str, Any]) -> Iterator[Any]:
    """The config of a demonstration: `settings` where the command line left an option at its default.

    Args:
        config: What the command line said.
        settings: What suits the demonstration's model and rows.

    Yields:
        A config that writes to a folder which is removed afterwards, unless `output_dir` was given.

    Example:
        >>> from posttrain_app import MethodConfig
        >>> from posttrain_app.demo import demonstration
        >>> with demonstration(MethodConfig(max_steps=3), {"max_steps": 40, "learning_rate": 1e-3}) as config:
        ...     config.max_steps, config.learning_rate
        (3, 0.001)
    """
    defaults = type(config)()
    names = [item.name for item in fields(config) if item.init]
    given = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(defaults, name)}
    with tempfile.TemporaryDirectory(prefix="posttrain-") as scratch:
        yield type(config)(**{**settings, "output_dir": scratch, **given})


def demonstrated_pairs(
    settings: Mapping[str, Any], figures: Mapping[str, str], architecture: Callable[..., Any] = tiny_model
) -> Demonstration:
    """Questions with a polite answer, which is preferred, and a rude one; a few are held out and evaluated.

    Args:
        settings: As of `Demonstration`.
        figures: Metrics of the evaluation by the name to print.
        architecture: As of `Demonstration`.

    Example:
        >>> from posttrain_app.demo import demonstrated_pairs
        >>> demonstrated_pairs({}, {}).rows[4]["chosen"][0]["content"]
        'Gladly! I would start in the north of France.'
    """
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Where should I go in {country}?"}],
            "chosen": [{"role": "assistant", "content": f"Gladly! I would start in the north of {country}."}],
            "rejected": [{"role": "assistant", "content": f"How should I know? Go to {country} and see."}],
        }
        for country in COUNTRIES
    ]

    def compare(before: dict, after: dict) -> dict[str, str]:
        return {name: f"{before[key]:.2f} -> {after[key]:.2f} on pairs held out" for name, key in figures.items()}

    return Demonstration(rows, settings, 4, lambda trainer: trainer.evaluate(), compare, architecture)

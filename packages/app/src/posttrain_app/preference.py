"""What methods share that learn from preferences with the help of a reference model: options, and the trainer."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from posttrain_data import PreferenceDataOptions, Prepared, Report
from posttrain_models import LoadOptions, unwrap
from posttrain_models.loading import adapter_config
from posttrain_models.references import FrozenModel, Reference, make_reference, precompute_reference
from posttrain_trainer import ShapePlan
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posttrain_app.arguments import resolve_args
from posttrain_app.config import LanguageConfig
from posttrain_app.loading import adapts, load_options
from posttrain_app.trainer import AppTrainer, Use

logger = logging.getLogger("posttrain")

UNMOVED = (
    "sync_ref_model=True moves a whole model towards the policy: train without an adapter, with a loss that has a "
    "reference."
)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class PreferenceConfig(LanguageConfig):
    """Options that `DPOConfig` and `KTOConfig` share, and every option of `transformers.TrainingArguments`."""

    learning_rate: float = _option(1e-6, "Peak learning rate of the optimiser.")

    # Model
    disable_dropout: bool = _option(True, "Train without dropout, so that policy and reference are comparable.")

    # Data
    max_length: int | None = _option(
        1024,
        "Longest prompt with completion in tokens; longer ones are cut, rows whose prompt fills it dropped.",
    )
    truncation_mode: Literal["keep_start", "keep_end"] = _option(
        "keep_start", "Which end of a completion that is too long to keep."
    )

    # Loss and reference
    beta: float = _option(0.1, "How strongly the reference holds the policy back.")
    precompute_ref_log_probs: bool = _option(
        False, "Compute the reference's log-probabilities once, before training, and keep them for other runs."
    )
    precompute_ref_batch_size: int | None = _option(
        None, "Rows of a batch while they are computed; none: that of training, or of evaluation."
    )
    sync_ref_model: bool = _option(False, "Move the reference towards the policy in mid-run (TR-DPO).")
    ref_model_mixup_alpha: float = _option(0.6, "Share of the policy in the reference when it is moved.")
    ref_model_sync_steps: int = _option(512, "Optimiser steps from one move to the next.")

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is loaded."""
        super().__post_init__()
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ValueError(f"ref_model_mixup_alpha={self.ref_model_mixup_alpha}: write a share above 0, 1 at most.")
        for name in ("ref_model_sync_steps", "precompute_ref_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: write a number of at least 1.")
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError(
                "sync_ref_model=True moves the reference, and precompute_ref_log_probs=True asks it once: leave one of "
                "the two out."
            )


class SyncReference(TrainerCallback):
    """Moves a reference towards the policy every `steps` optimiser steps: r <- a * policy + (1 - a) * r.

    The reference is part of the run's state then, and is saved with every checkpoint.

    Args:
        reference: The reference, a copy of the whole model.
        steps: Optimiser steps from one move to the next.
        alpha: a, the policy's share.

    Source: Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment", arXiv 2404.09656.
    """

    def __init__(self, reference: FrozenModel, steps: int, alpha: float) -> None:
        self.reference, self.steps, self.alpha = reference, steps, alpha

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Move it, when it is time."""
        if state.global_step % self.steps == 0:
            self.reference.sync(unwrap(model), self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """The reference's weights."""
        return dict(unwrap(self.reference.model).state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""
        unwrap(self.reference.model).load_state_dict(state)


class Untrained(Reference):
    """The policy itself, while it has not been trained yet: a reference that is asked beforehand alone."""

    def _in_place(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        return nullcontext(model)

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights of the policy."""
        yield from unwrap(model).state_dict().items()


class PreferenceTrainer(AppTrainer):
    """A trainer of prompts with completions, a policy and its reference: what `DPOTrainer` and `KTOTrainer` share.

    A subclass sets `config_class`, `collator_class`, `num_completions` and `read_rows`, the preparation of its rows,
    and makes a method that is a dataclass with `needs_reference` and a `reference` that is still None.

    Args:
        model: This and all but the next as `AppTrainer` takes it.
        ref_model: The reference, in any of these forms. By default what `model` is before training: with an adapter
            the model without it, otherwise a second copy.
        args: A `PreferenceConfig`; plain `TrainingArguments` and None take the defaults for the rest.
        data_collator: Makes a `CompletionBatch` of prepared rows; by default one that follows the shape plan.
        train_dataset: Rows.
        eval_dataset: Rows to evaluate on, or several sets of them by name.
        processing_class: The tokenizer or processor; by default the model's own.
        others: The other arguments, by name.
    """

    read_rows: ClassVar[Callable[..., Prepared]]

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        args = resolve_args(args, self.config_class, model)
        self._named = named_reference(model, ref_model, args)
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, processing_class, **others)
        reference = self.method.reference
        if args.sync_ref_model:
            self.add_callback(SyncReference(reference, args.ref_model_sync_steps, args.ref_model_mixup_alpha))
        if args.precompute_ref_log_probs and reference is not None:
            self._precompute(reference)

    def check(self, sets: Mapping[str, Any], compute_metrics: Callable | None, peft_config: Any) -> None:
        """Refuse rows that cannot be read beforehand, and a reference that cannot be moved."""
        streams = [name for name, rows in sets.items() if not hasattr(rows, "__len__")]
        if self.args.precompute_ref_log_probs and streams:
            raise ValueError(
                f"precompute_ref_log_probs=True reads every row beforehand, which a stream cannot give: {streams[0]}."
            )
        if self.args.sync_ref_model and adapts(peft_config):
            raise ValueError(UNMOVED)

    def prepare(self, dataset: Any, name: str, use: Use) -> tuple[Any, Report | None]:
        """Prompts and completions as token ids."""
        args = self.args
        options = PreferenceDataOptions(
            max_length=args.max_length, truncation_mode=args.truncation_mode, num_proc=args.dataset_num_proc
        )
        return self.read_rows(dataset, self.processing_class, options, name=name)

    # ---- Reference ----

    def complete_method(self, method: Any, model: nn.Module, load: Callable[[Any], nn.Module]) -> Any:
        """The method with its reference, where it needs one."""
        named, self._named = self._named, None
        if method.needs_reference:
            if isinstance(named, LoadOptions):
                named = load(named)
            method = replace(method, reference=self._reference(method, model, named))
        elif named is not None:
            logger.warning("ref_model is not used: this loss has no reference")
        if self.args.sync_ref_model and not isinstance(method.reference, FrozenModel):
            raise ValueError(UNMOVED)
        return method

    def needs_copy(self, plan: ShapePlan, adapter: bool) -> bool:
        """Whether the reference is a second copy of the model, to the end of the run."""
        method = self.make_method(plan, 0.0)
        return method.needs_reference and not adapter and not self._asked_once(method)

    def _asked_once(self, method: Any) -> bool:
        """Whether the reference is done when training begins."""
        return self.args.precompute_ref_log_probs and not getattr(method, "keeps_reference", False)

    def _reference(self, method: Any, policy: nn.Module, ref_model: nn.Module | None) -> Reference:
        if self._asked_once(method) and ref_model is None and not hasattr(unwrap(policy), "peft_config"):
            return Untrained()
        return make_reference(policy, ref_model)

    def _precompute(self, reference: Reference) -> None:
        """Gives every row the reference's log-probabilities; a reference that is a second model is let go."""
        args = self.args

        def computed(rows: Any, size: int) -> Any:
            if rows is None:
                return None
            with self.accelerator.autocast():
                return precompute_reference(
                    reference, self.model, rows, self.data_collator, batch_size=args.precompute_ref_batch_size or size
                )

        self.train_dataset = computed(self.train_dataset, args.per_device_train_batch_size)
        size = args.per_device_eval_batch_size
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: computed(rows, size) for name, rows in self.eval_dataset.items()}
        else:
            self.eval_dataset = computed(self.eval_dataset, size)
        if isinstance(reference, FrozenModel | Untrained) and self._asked_once(self.method):
            self.method = replace(self.method, reference=None)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """The precision of training around the whole loss: a reference runs in it as the policy does."""
        return self.accelerator.autocast()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer` does, with `method.prepare` in the precision of training."""
        with self.accelerator.autocast():
            return super().get_batch_samples(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer` does, in the precision of training."""
        with self.accelerator.autocast():
            return super().evaluation_loop(*args, **kwargs)


def named_reference(model: Any, ref_model: Any, args: PreferenceConfig) -> nn.Module | LoadOptions | None:
    """The reference that was passed: a model, or how to load it, which is as the policy is loaded; None for none.

    Raises:
        ValueError: Naming the argument and what to write instead.
    """
    if ref_model is None:
        return None
    if isinstance(ref_model, nn.Module):
        if ref_model is model:
            raise ValueError(
                "ref_model is the model that is trained: leave it out, and the reference is what the model is now."
            )
        return ref_model
    if isinstance(ref_model, LoadOptions):
        if not ref_model.model_name_or_path:
            raise ValueError("ref_model names no model: give it model_name_or_path, or leave it out.")
        return ref_model
    if not isinstance(ref_model, str | os.PathLike):
        raise ValueError(f"ref_model must be a name, a path, LoadOptions or a model; got {type(ref_model).__name__}.")
    like = load_options(model, args) or LoadOptions(trust_remote_code=args.trust_remote_code)
    adapter_config(os.fspath(ref_model))  # refuses a folder that is not there
    return replace(like, model_name_or_path=os.fspath(ref_model), model_revision="main")

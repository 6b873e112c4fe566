"""What methods share that learn from preferences with the help of a reference model: options, and the trainer."""

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from posttrain_collators import CompletionBatch
from posttrain_models import LoadOptions, fit_tokens, unwrap
from posttrain_models.references import FrozenModel, Reference, make_reference
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posttrain_trainer.facade import (
    MethodConfig,
    balancing_coefficient,
    check_run,
    disable_dropout,
    inner_tokenizer,
    load_options,
    plan_completions,
    prepared_sets,
    resolve_args,
    resolve_model,
    resolve_tokenizer,
    sketch,
)
from posttrain_trainer.plan import ShapePlan
from posttrain_trainer.trainer import Trainer

logger = logging.getLogger("posttrain")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class PreferenceConfig(MethodConfig):
    """Options that `DPOConfig` and `KTOConfig` share, and every option of `transformers.TrainingArguments`."""

    learning_rate: float = _option(1e-6, "Peak learning rate of the optimiser.")

    # Model
    router_aux_loss_coef: float | None = _option(
        None, "Weight of a mixture of experts' load-balancing loss; none takes the model's own, 0 turns it off."
    )
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
        if self.router_aux_loss_coef is not None and self.router_aux_loss_coef < 0:
            raise ValueError(f"router_aux_loss_coef must not be negative; got {self.router_aux_loss_coef}.")
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
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not offered: it needs the full logits of every token.")


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


class PreferenceTrainer(Trainer):
    """A trainer of prompts with completions, a policy and its reference: what `DPOTrainer` and `KTOTrainer` share.

    A subclass sets `config_class` and `num_completions`, and says how rows are prepared (`prepare_rows`), collated
    (`make_collator`) and learned from (`make_method`).
    """

    config_class: ClassVar[type[PreferenceConfig]]
    num_completions: ClassVar[int]

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        args = resolve_args(args, self.config_class, model, self.config_class.__name__.removesuffix("Config"))
        check_run(args, train_dataset, eval_dataset)
        check_reference(args, model, ref_model, train_dataset)
        processing_class = resolve_tokenizer(model, args, processing_class)
        tokenizer = inner_tokenizer(processing_class)
        self.args, self.processing_class = args, processing_class
        train_dataset = self.prepare_rows(train_dataset, "train")
        eval_dataset = prepared_sets(eval_dataset, self.prepare_rows)

        options = load_options(model, args)
        demanding = args.padding_free or args.max_shapes or args.router_aux_loss_coef
        cut = sketch(options, args) if options is not None and demanding else None
        if cut is not None:
            balancing_coefficient(cut, args.router_aux_loss_coef)
            plan_completions(cut, args, self.num_completions, train_dataset, eval_dataset)
        ends = self.terminators(tokenizer)
        given = {"quantization_config": quantization_config, "fit": lambda one: fit_tokens(one, tokenizer, ends)}
        policy = resolve_model(model, args, peft_config=peft_config, **given)
        coefficient = balancing_coefficient(unwrap(policy), args.router_aux_loss_coef)
        if args.disable_dropout:
            disable_dropout(policy)
        plan = plan_completions(policy, args, self.num_completions, train_dataset, eval_dataset)
        logger.info(str(plan))
        method = self.make_method(plan, coefficient)
        reference = None
        if method.needs_reference:
            reference = self._reference(policy, load_reference(model, ref_model, args, given), method)
            method = replace(method, reference=reference)
        callbacks = list(callbacks or ())
        if args.sync_ref_model:
            callbacks.append(self._syncing(reference))
        super().__init__(
            model=policy,
            method=method,
            args=args,
            data_collator=data_collator or self.make_collator(plan, tokenizer.pad_token_id),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            shape_plan=plan,
        )
        if args.precompute_ref_log_probs and reference is not None:
            self._precompute(reference)

    # ---- What a subclass says ----

    @abstractmethod
    def prepare_rows(self, dataset: Any, name: str) -> Any:
        """Rows as token ids, by `self.processing_class` and `self.args`; says what became of them."""

    @abstractmethod
    def terminators(self, tokenizer: Any) -> list[int]:
        """Tokens that end a turn."""

    @abstractmethod
    def make_collator(self, plan: ShapePlan, pad_id: int) -> Callable:
        """What makes a batch of prepared rows."""

    @abstractmethod
    def make_method(self, plan: ShapePlan, coefficient: float) -> Any:
        """The method, a dataclass with a `reference` that is still None, and the load-balancing loss's weight."""

    # ---- Reference ----

    def _reference(self, policy: nn.Module, ref_model: nn.Module | None, method: Any) -> Reference:
        once = self.args.precompute_ref_log_probs and not getattr(method, "keeps_reference", False)
        if once and ref_model is None and not hasattr(unwrap(policy), "peft_config"):
            return Untrained()
        return make_reference(policy, ref_model)

    def _syncing(self, reference: Reference | None) -> SyncReference:
        if not isinstance(reference, FrozenModel):
            raise ValueError(
                "sync_ref_model=True moves a whole model towards the policy: train without an adapter, with a loss "
                "that has a reference."
            )
        return SyncReference(reference, self.args.ref_model_sync_steps, self.args.ref_model_mixup_alpha)

    def _precompute(self, reference: Reference) -> None:
        """Gives every row the reference's log-probabilities; a reference that is a second model is let go."""
        from posttrain_models.references import precompute_reference

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
        if isinstance(reference, FrozenModel | Untrained) and not getattr(self.method, "keeps_reference", False):
            self.method = replace(self.method, reference=None)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """The precision of training around the whole loss: a reference runs in it as the policy does."""
        return self.accelerator.autocast()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer` does, with `method.prepare` in the precision of training."""
        with self.accelerator.autocast():
            return super().get_batch_samples(*args, **kwargs)

    # ---- Evaluation ----

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict:
        """Evaluate on the data set of the constructor, or on other rows, which are prepared in the same way."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = prepared_sets(eval_dataset, self.prepare_rows)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """Rewards, labels and metrics of rows, which are prepared as evaluation rows are."""
        return super().predict(self.prepare_rows(test_dataset, metric_key_prefix), ignore_keys, metric_key_prefix)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer` does, in the precision of training."""
        with self.accelerator.autocast():
            return super().evaluation_loop(*args, **kwargs)


def check_reference(args: PreferenceConfig, model: Any, ref_model: Any, train_dataset: Any) -> None:
    """Refuse a reference that cannot be, before weights are loaded.

    Raises:
        ValueError: Naming the argument or option and what to write instead.
    """
    if ref_model is not None and ref_model is model and isinstance(model, nn.Module):
        raise ValueError(
            "ref_model is the model that is trained: leave it out, and the reference is what the model is now."
        )
    if ref_model is not None and not isinstance(ref_model, nn.Module | LoadOptions | str | os.PathLike):
        raise ValueError(f"ref_model must be a name, a path, LoadOptions or a model; got {type(ref_model).__name__}.")
    if args.precompute_ref_log_probs and not hasattr(train_dataset, "__len__"):
        raise ValueError("precompute_ref_log_probs=True reads every row beforehand, which a stream cannot give.")


def load_reference(model: Any, ref_model: Any, args: PreferenceConfig, given: dict[str, Any]) -> nn.Module | None:
    """The model that is named as the reference, loaded as the policy is; a model as it is, and None for none."""
    if ref_model is None or isinstance(ref_model, nn.Module):
        return ref_model
    if not isinstance(ref_model, LoadOptions):
        like = load_options(model, args) or LoadOptions(trust_remote_code=args.trust_remote_code)
        ref_model = replace(like, model_name_or_path=os.fspath(ref_model), model_revision="main")
    return resolve_model(ref_model, args, **given)


# ---- What methods read of a batch ----


def scored(batch: CompletionBatch) -> Tensor:
    """Completion tokens `(P, G, Tc)` of rows that count: the first one has no log-probability without a prompt.

    Example:
        >>> from posttrain_collators import PreferenceCollator
        >>> from posttrain_trainer.preference import scored
        >>> scored(PreferenceCollator(0)([{"chosen_ids": [7, 8, 9], "rejected_ids": [7, 5]}])).int().tolist()
        [[[0, 1, 1], [0, 1, 0]]]
    """
    mask = batch.completion_mask.clone()
    mask[..., 0] &= batch.prompt_mask.any(-1)[:, None]
    return mask & real_of(mask)[:, None, None]


def real_of(mask: Tensor) -> Tensor:
    """Rows `(P,)` all of whose completions have a token under a mask `(P, G, Tc)`."""
    return mask.any(-1).all(-1)


def real(batch: CompletionBatch) -> Tensor:
    """Rows `(P,)` that count: every completion has a token that is scored."""
    return real_of(scored(batch))


def carried_or_computed(reference: Reference | None, model: nn.Module, batch: CompletionBatch) -> Tensor:
    """Log-probabilities `(P, G, Tc)` under the reference: those that the rows carry, or computed.

    Raises:
        ValueError: There are neither.
    """
    carried = getattr(batch.extras, "reference_logps", None)
    if carried is not None:
        return carried
    if reference is None:
        raise ValueError(
            "these rows carry no log-probabilities of the reference, and there is no reference to compute them "
            "(precompute_ref_log_probs=True keeps none): pass rows to the trainer's constructor, or leave it out."
        )
    return reference.logps(model, batch)

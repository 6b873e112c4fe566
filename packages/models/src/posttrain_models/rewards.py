"""Reward models: sequence classifiers with one output, read at the last token of each completion.

transformers' own pooling finds the last token by the padding id: wrong where the end token pads too, and one score for
a whole packed row. Here the head is asked from within the model's own forward, at positions known from lengths.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from posttrain_collators import CompletionBatch
from posttrain_devices import device_spec
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from posttrain_models.head import ScoringHead, asking
from posttrain_models.inputs import CompletionPlan, build_completion_plan
from posttrain_models.layout import choose_layout
from posttrain_models.loading import complain_missing, load_with, read_config, read_weights, ready
from posttrain_models.options import LoadOptions
from posttrain_models.tiny import tiny_reward_model
from posttrain_models.unwrap import base_model, state_of, text_config

__all__ = ["completion_scores", "load_reward_model", "tiny_reward_model"]

logger = logging.getLogger("posttrain")

CLASSIFIER = "ForSequenceClassification"


def completion_scores(model: nn.Module, batch: CompletionBatch) -> Tensor:
    """The reward of every completion given its prompt: the model's score at the completion's last token.

    The position is known from the masks, never from a padding id. The model is called once, in the layout that
    `choose_layout` chose (called here at first use); the head computes in float32 under autocast too.

    Args:
        model: A sequence classifier with one label and a head named `score`, plain or wrapped (DDP, FSDP2,
            `torch.compile`, PEFT).
        batch: P prompts with G completions each; its tensors may be on the CPU.

    Returns:
        `(P, G)` float32, differentiable; 0 for fillers, which are completions without a token.

    Raises:
        ValueError: The model is no sequence classifier with one label.

    Example:
        >>> from posttrain_collators import PreferenceCollator
        >>> from posttrain_models.rewards import completion_scores, tiny_reward_model
        >>> batch = PreferenceCollator(0)([{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}])
        >>> completion_scores(tiny_reward_model("llama"), batch).shape
        torch.Size([1, 2])
    """
    base = base_model(model)
    _check_scalar(base)
    layout = state_of(base).layout
    if layout is None:
        static = device_spec(next(base.parameters()).device).static_shapes
        layout = choose_layout(model, static_shapes=static, completions=True)
        logger.info("layout %s: %s", layout.name, layout.reason)
    plan = build_completion_plan(base, batch, layout.name, layout.static_shapes)
    answer = _ask(model, base, plan)
    there = batch.completion_mask.any(-1).to(answer.device)
    scores = answer.view(there.shape)
    return torch.where(there, scores, torch.zeros_like(scores))


def _check_scalar(base: Any) -> None:
    if not isinstance(getattr(base, "score", None), nn.Module):
        raise ValueError(f"{type(base).__name__} has no reward head named score; load it with load_reward_model")
    labels = base.config.num_labels
    if labels != 1:
        raise ValueError(f"{type(base).__name__} has num_labels={labels}; a reward model has 1, so name another")


class _Scores(NamedTuple):
    """The scores that were asked for, in the place of logits `(B, T, 1)`.

    A NamedTuple, so that wrappers that traverse outputs find its tensor.
    """

    values: Tensor

    @property
    def device(self) -> torch.device:
        """Where the scores are."""
        return self.values.device

    def __getitem__(self, key: Any) -> Any:
        """The model's own pooling picks one position of every row; here they are picked already."""
        return self if isinstance(key, tuple) else tuple.__getitem__(self, key)


@dataclass
class _Question:
    """Set on a head: which positions `index` (n,) of the flattened hidden states to score."""

    index: Tensor
    positions: int

    def pick(self, states: Tensor) -> Tensor:
        """The rows of `states (..., D)` at the positions."""
        if states.numel() != self.positions * states.shape[-1]:
            raise ValueError(f"the reward head was called with {tuple(states.shape)} for {self.positions} positions")
        return states.reshape(-1, states.shape[-1]).index_select(0, self.index)

    def answer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Scores:
        """Scores in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            scores = F.linear(self.pick(hidden).float(), weight.float(), None if bias is None else bias.float())
        return _Scores(scores.squeeze(-1))


def _ask(model: nn.Module, base: Any, plan: CompletionPlan) -> Tensor:
    question = _Question(plan.last, plan.positions)
    with _asking(base, question), _some_padding(base), plan.context():
        logits = model(**plan.kwargs).logits
    if not isinstance(logits, _Scores):
        raise ValueError(f"{type(base).__name__} does not call its head named score as a module, so it cannot be asked")
    return logits.values.float()


@contextmanager
def _asking(base: Any, question: _Question) -> Iterator[None]:
    """Set the question on the head for one call: on the linear layers that may be it, or around whatever it is."""
    copies = getattr(base.score, "modules_to_save", None)
    heads = [base.score] if copies is None else [base.score.original_module, *copies.values()]
    if all(isinstance(h, nn.Linear) and type(h).forward in (nn.Linear.forward, ScoringHead.forward) for h in heads):
        with asking(heads, question):
            yield
        return
    hook = base.score.register_forward_hook(lambda _, __, out: _Scores(question.pick(out).squeeze(-1)))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _some_padding(base: Any) -> Iterator[None]:
    """A padding id, without which the model's own pooling, whose result is not used, refuses several rows."""
    config = text_config(base)
    before = config.pad_token_id
    if before is None:
        config.pad_token_id = 0
    try:
        yield
    finally:
        config.pad_token_id = before


def load_reward_model(
    model: str | os.PathLike[str] | nn.Module | LoadOptions,
    options: LoadOptions | None = None,
    *,
    model_init_kwargs: dict[str, Any] | str | None = None,
    quantization_config: Any = None,
    device: str | torch.device | None = "auto",
) -> Any:
    """Load a reward model: a sequence classifier with one label, from such a checkpoint or from a language model's.

    A language model gets a new head, the same one every time, and a line says so. The saved model loads with
    `AutoModelForSequenceClassification`. A checkpoint that names no padding token gets its end token as one. Scores
    of transformers' own pooling then differ from `completion_scores` on texts that end with it, since it takes
    trailing end tokens for padding; a padding token of its own avoids that.

    Args:
        model: As for `load_model`, or options that name it.
        options: As for `load_model`.
        model_init_kwargs: As for `load_model`.
        quantization_config: As for `load_model`.
        device: As for `load_model`.

    Returns:
        The model, in training mode for a loaded one.

    Raises:
        ValueError: As `load_model`; the architecture has no sequence classifier; or the model has other than one label.

    Example:
        >>> import tempfile
        >>> from posttrain_models import tiny_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tiny_model("llama").save_pretrained(folder)
        ...     model = load_reward_model(folder, device=None)
        >>> type(model).__name__, model.config.num_labels
        ('LlamaForSequenceClassification', 1)
    """
    if isinstance(model, LoadOptions):
        options = model
        if not options.model_name_or_path:
            raise ValueError("model_name_or_path is missing: name the model, a folder or a name on the hub")
        model = options.model_name_or_path
    loaded = load_with(_load_base, model, options, model_init_kwargs, quantization_config, device)
    _check_scalar(base_model(loaded))
    return loaded


def _load_base(name: str, arguments: dict[str, Any], dtype_chosen: bool) -> PreTrainedModel:
    config = read_config(name, arguments)
    _check_config(name, config, arguments)
    if "config" not in arguments:
        arguments = {**arguments, "num_labels": 1}
    with _without_load_report(), torch.random.fork_rng(devices=[]):
        model, info = read_weights(AutoModelForSequenceClassification, name, arguments)
    new = [key for key in info["missing_keys"] if key.startswith("score.")]
    complain_missing(name, model, set(info["missing_keys"]) - set(new))
    _check_scalar(model)
    if new:
        _start_head(model)
        logger.info("the reward head of %s is new: it is learned from scratch", name)
    for part in {id(one): one for one in (model.config, text_config(model))}.values():
        if part.pad_token_id is None:
            ends = part.eos_token_id
            part.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return ready(model, arguments, dtype_chosen)


def _check_config(name: str, config: Any, arguments: dict[str, Any]) -> None:
    known = type(config) in AutoModelForSequenceClassification._model_mapping
    own_code = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    if not known and not own_code:
        raise ValueError(f"model {name} is a {config.model_type}, which has no sequence classifier in transformers")
    classifier = any(named.endswith(CLASSIFIER) for named in config.architectures or [])
    labels = arguments.get("num_labels", config.num_labels if classifier or "config" in arguments else 1)
    if labels != 1:
        raise ValueError(f"model {name} has num_labels={labels}; a reward model has 1, so name another")


@contextmanager
def _without_load_report() -> Iterator[None]:
    """What is missing is said in one line here."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _start_head(model: Any) -> None:
    """A head that does not depend on the random state, and does not change it."""
    std = getattr(text_config(model), "initializer_range", 0.02)
    weight = model.score.weight
    start = torch.empty(weight.shape).normal_(0.0, std, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if weight.device.type != "meta":
            weight.copy_(start)
        if model.score.bias is not None:
            model.score.bias.zero_()

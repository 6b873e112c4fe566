"""Log-probabilities of completions: the scorer of preference, feedback and reinforcement learning methods."""

from __future__ import annotations

from typing import NamedTuple

from posttrain_collators import CompletionBatch
from torch import Tensor, nn

from posttrain_models.head import Request
from posttrain_models.inputs import build_completion_plan
from posttrain_models.scorer import ask, prepared
from posttrain_models.unwrap import base_model


class CompletionScores(NamedTuple):
    r"""Scores `(P, G, Tc)` of completion tokens; 0 or False where there is no token.

    Attributes:
        logps: float32 log-probabilities in nats, differentiable.
        entropy: float32 entropy in nats of the distribution each token was drawn from, differentiable; None unless
            asked for.
        top1: bool, the token is the most likely one.
        mean_logit: float32 mean over the vocabulary of the logits that predict each token, at temperature 1, without
            gradient; None unless asked for, and of models that cap their logits.
        collision: float32 collision entropy $-\log\sum_v p_v^2$ in nats of the distribution each token was drawn from,
            without gradient; None unless asked for.
        aux_loss: Scalar, the router's balance loss of a mixture of experts that is asked for it, unscaled; else None.
    """

    logps: Tensor
    entropy: Tensor | None
    top1: Tensor
    mean_logit: Tensor | None
    collision: Tensor | None
    aux_loss: Tensor | None


def score_completions(
    model: nn.Module,
    batch: CompletionBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    mean_logit: bool = False,
    collision: bool = False,
) -> CompletionScores:
    r"""Log-probability $\log p(y_t \mid x, y_{<t})$, in nats, of every token of completions y of prompts x.

    The model is called once, in the layout that `choose_layout` chose (called here at first use, for completions).
    Under `shared` a prompt is computed once for all of its completions: each attends to it and to itself, at the
    positions that follow it. Every layout gives the same numbers and gradients, to float32 round-off. The full logits
    are never formed, and only positions that predict a completion token reach the LM head. The tensors of `batch` may
    be on the CPU.

    The first token of a completion is predicted by the last token of its prompt. Without a prompt nothing predicts
    it: its scores are 0 and it counts for nothing, so such completions are scored from their second token.

    Args:
        model: A causal language model, plain or wrapped (DDP, FSDP2, `torch.compile`, PEFT).
        batch: P prompts with G completions each.
        temperature: Divides the logits.
        entropy: Also return entropies.
        mean_logit: Also return the mean logit of every position.
        collision: Also return collision entropies.

    Returns:
        The scores `(P, G, Tc)`.

    Raises:
        ValueError: The batch is empty or its masks are no left and right padding, or the model cannot be scored, with
            the reason.

    Example:
        >>> from posttrain_collators import Padding, PreferenceCollator
        >>> from posttrain_models import score_completions, tiny_model
        >>> row = {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [9]}
        >>> batch = PreferenceCollator(Padding(pad_id=0), Padding(pad_id=0))([row])
        >>> scores = score_completions(tiny_model("llama"), batch, entropy=True)
        >>> scores.logps.shape, bool(scores.logps[0, 1, 1] == 0)
        (torch.Size([1, 2, 2]), True)
    """
    base = base_model(model)
    layout = prepared(model, base, completions=True)
    plan = build_completion_plan(base, batch, layout.name, layout.static_shapes)
    more = {"mean_logit": mean_logit, "collision": collision}
    request = Request(plan.targets, plan.index, plan.positions, temperature, entropy, **more)
    answer, aux_loss = ask(model, base, plan, request)

    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else plan.spread(values)

    return CompletionScores(
        plan.spread(answer.logps),
        spread(answer.entropy),
        plan.spread(answer.top1),
        spread(answer.mean_logit),
        spread(answer.collision),
        aux_loss,
    )


def completion_logps(model: nn.Module, batch: CompletionBatch, *, temperature: float = 1.0) -> Tensor:
    """Log-probability, in nats, of every completion token: the `logps` of `score_completions`.

    Args:
        model: As in `score_completions`.
        batch: P prompts with G completions each.
        temperature: Divides the logits.

    Returns:
        `(P, G, Tc)` float32, differentiable; 0 where there is no token.

    Raises:
        ValueError: As `score_completions`.

    Example:
        >>> from posttrain_collators import Padding, PreferenceCollator
        >>> from posttrain_models import completion_logps, tiny_model
        >>> row = {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [9]}
        >>> batch = PreferenceCollator(Padding(pad_id=0), Padding(pad_id=0))([row])
        >>> completion_logps(tiny_model("llama"), batch).sum(-1).shape
        torch.Size([1, 2])
    """
    return score_completions(model, batch, temperature=temperature).logps

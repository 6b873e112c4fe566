"""Token ids in, log-probabilities out: the one way from a model to a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from posttrain_collators import TokenBatch
from posttrain_losses import TokenScores
from torch import Tensor, nn

from posttrain_models.head import (
    Answer,
    HeadError,
    PostHead,
    Request,
    asking,
    find_heads,
    find_tied,
    read_steps,
)
from posttrain_models.inputs import Plan, build_plan
from posttrain_models.layout import Layout, choose_layout, probe_batch
from posttrain_models.unwrap import base_model, quiet, state_of, text_config, unwrap

logger = logging.getLogger("posttrain")


class ModelSum(NamedTuple):
    """A weighted sum over the targets of a batch.

    Attributes:
        total: Scalar, differentiable: the sum of `weight * reweight(logp) * logp` over targets.
        scores: `(B, T)` detached scores of every target, 0 elsewhere.
        aux_loss: The router's balance loss of a mixture of experts that is asked for it, unscaled; else None.
    """

    total: Tensor
    scores: TokenScores
    aux_loss: Tensor | None


@dataclass(frozen=True)
class _Head:
    """How the logits of a model are computed: fused with `post`, or plainly because of `reason`.

    Valid for the head `modules` it was found for, by identity: an adapter added later, or a copy, is probed anew.
    """

    fused: bool
    post: PostHead = PostHead()
    reason: str = ""
    modules: tuple[int, ...] = ()


def score_tokens(
    model: nn.Module, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False
) -> TokenScores:
    """Log-probability, in nats, of every target token given the tokens before it in its sequence.

    The full logits are never formed: the LM head answers with scores, from within the model's own forward. The model is
    called once, in the layout that `choose_layout` chose (called here at first use). The tensors of `batch` may be on
    the CPU.

    Args:
        model: A causal language model, plain or wrapped (DDP, FSDP2, `torch.compile`, PEFT).
        batch: B rows of T positions.
        temperature: Divides the logits.
        entropy: Also return the entropy of each predicted distribution.

    Returns:
        `logps (B, T)` float32, `entropy (B, T)` or None, both differentiable, and `top1 (B, T)`: the target is the most
        likely token. Where a token is not a target they are 0 and False.

    Raises:
        ValueError: The batch is empty, or the model cannot be scored, with the reason.

    Example:
        >>> import torch
        >>> from posttrain_collators import Padding, TokenCollator
        >>> from posttrain_models import score_tokens, tiny_model
        >>> batch = TokenCollator(Padding(pad_id=0))([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> score_tokens(tiny_model("llama"), batch).logps.shape
        torch.Size([2, 3])
    """
    plan, answer, _ = _run(model, batch, None, None, temperature, entropy)
    spread = plan.spread
    return TokenScores(
        spread(answer.logps),
        None if answer.entropy is None else spread(answer.entropy),
        spread(answer.top1),
    )


def weighted_logp_sum(
    model: nn.Module,
    batch: TokenBatch,
    weights: Tensor,
    *,
    reweight: Callable[[Tensor], Tensor] | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
) -> ModelSum:
    """The sum over targets of `weight * reweight(logp) * logp`, for losses linear in log-probabilities.

    The weights are known before the model runs, so the gradients of the head are computed in the forward and nothing is
    recomputed in the backward.

    Args:
        model: As in `score_tokens`.
        batch: B rows of T positions.
        weights: `(B, T)`; those of tokens that are not targets are ignored. Not differentiated.
        reweight: A further weight, an element-wise function of log-probabilities (`torch.exp` is `dft`); no gradient.
        temperature: Divides the logits.
        entropy: Also return entropies.

    Returns:
        The differentiable total, the detached scores `(B, T)`, and the balance loss of a mixture of experts.

    Raises:
        ValueError: As `score_tokens`, or weights of another shape.

    Example:
        >>> import torch
        >>> from posttrain_collators import Padding, TokenCollator
        >>> from posttrain_models import tiny_model, weighted_logp_sum
        >>> batch = TokenCollator(Padding(pad_id=0))([{"input_ids": [5, 6, 7]}])
        >>> model = tiny_model("llama")
        >>> weighted_logp_sum(model, batch, -torch.ones(1, 3)).total.backward()
        >>> model.lm_head.weight.grad is not None
        True
    """
    if weights.shape != batch.input_ids.shape:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}; it must be that of the batch, {tuple(batch.input_ids.shape)}"
        )
    plan, answer, aux_loss = _run(model, batch, weights, reweight, temperature, entropy)
    assert answer.total is not None
    with torch.no_grad():
        entropies = None if answer.entropy is None else plan.spread(answer.entropy.detach())
        scores = TokenScores(plan.spread(answer.logps.detach()), entropies, plan.spread(answer.top1))
    return ModelSum(answer.total, scores, aux_loss)


def _run(
    model: nn.Module,
    batch: TokenBatch,
    weights: Tensor | None,
    reweight: Callable[[Tensor], Tensor] | None,
    temperature: float,
    entropy: bool,
) -> tuple[Plan, Answer, Tensor | None]:
    base = base_model(model)
    layout = prepared(model, base)
    plan = build_plan(base, batch, layout.name, layout.static_shapes)
    taken = None if weights is None else plan.take(weights.detach()).float()
    request = Request(plan.targets, plan.index, plan.positions, temperature, entropy, taken, reweight)
    return plan, *ask(model, base, plan, request)


def ask(model: nn.Module, base: Any, plan: Plan, request: Request) -> tuple[Answer, Tensor | None]:
    """The answer of a prepared model to a request about a plan, and its balance loss."""
    head = state_of(base).head
    outputs = _call(model, base, plan, replace(request, post=head.post) if head.fused else None)
    answer = _checked(outputs.logits, head.post) if head.fused else _plain(outputs.logits, request)
    return answer, getattr(outputs, "aux_loss", None)


def _call(model: nn.Module, base: Any, plan: Plan, request: Request | None) -> Any:
    with plan.context():
        if request is None:
            return model(**plan.kwargs)
        heads = find_heads(base)
        with asking([*heads, *find_tied(base, heads)], request):
            return model(**plan.kwargs)


def _checked(logits: Any, post: PostHead) -> Answer:
    if not isinstance(logits, Answer):
        raise HeadError("the LM head was not called as a module")
    applied = read_steps(logits.steps)
    if not applied.same(post):
        raise HeadError(f"the model applies {applied} after its head where {post} was expected")
    return logits


def _plain(logits: Tensor, request: Request) -> Answer:
    """The same scores from full logits."""
    if logits.numel() != request.positions * logits.shape[-1]:
        raise ValueError(f"the model returned logits of shape {tuple(logits.shape)} for {request.positions} positions")
    logits = logits.reshape(-1, logits.shape[-1])
    if request.index is not None:
        logits = logits.index_select(0, request.index)
    logits = logits.float() / request.temperature
    mean = logits.detach().mean(-1) * request.temperature if request.mean_logit else None
    everything = logits.log_softmax(-1)
    logps = everything.gather(1, request.targets[:, None]).squeeze(1)
    entropy = -(everything.exp() * everything).sum(-1) if request.entropy else None
    top1 = logits.detach().argmax(-1) == request.targets
    collision = -(2 * everything.detach()).logsumexp(-1) if request.collision else None
    total = None
    if request.weights is not None:
        factor = request.weights
        if request.reweight is not None:
            factor = factor * request.reweight(logps.detach()).detach()
        # Not a product alone: 0 * -inf at a position without a target is NaN.
        total = torch.where(factor == 0, torch.zeros_like(logps), factor * logps).sum()
    return Answer(logps, entropy, top1, total, mean, collision)


def prepared(model: nn.Module, base: Any, completions: bool = False) -> Layout:
    """Find out, at first use, in which layout a model runs and how its head answers; returns the layout."""
    state = state_of(base)
    if state.layout is None:
        layout = choose_layout(model, static_shapes=_static(base), completions=completions)
        logger.info("layout %s: %s", layout.name, layout.reason)
    modules = _head_modules(base)
    if state.head is None or state.head.modules != modules:
        _refuse_prompts(model)
        state.head = replace(_probe_head(model, base, state.layout), modules=modules)
        if not state.head.fused:
            logger.warning("full logits are computed, which costs memory: %s", state.head.reason)
    return state.layout


def _static(base: Any) -> bool:
    from posttrain_devices import device_spec

    return device_spec(next(base.parameters()).device).static_shapes


def _head_modules(base: Any) -> tuple[int, ...]:
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return () if head is None else tuple(id(module) for module in head.modules())


def _refuse_prompts(model: nn.Module) -> None:
    configs = getattr(unwrap(model), "peft_config", None) or {}
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(f"adapter {name!r} adds virtual tokens to the input, which cannot be scored; use LoRA")


def _probe_head(model: nn.Module, base: Any, layout: Layout) -> _Head:
    """Compare the fused head with the model's own logits on two short rows, in float32."""
    try:
        find_heads(base)
    except HeadError as error:
        return _Head(False, reason=str(error))
    if layout.static_shapes and next(base.parameters()).device.type != "cpu":
        # A probe would cost a compilation; every call still checks what the model does after its head.
        return _Head(True, _declared(base))
    plan = build_plan(base, probe_batch(base), "padded", False)
    request = Request(plan.targets, plan.index, plan.positions)
    try:
        with quiet(model, base) as precision:
            logits = _call(model, base, plan, None).logits
            plain = _plain(logits, request).logps
            first = _call(model, base, plan, request).logits
            if not isinstance(first, Answer):
                raise HeadError("the LM head was not called as a module")
            post = read_steps(first.steps)
            fused = _checked(_call(model, base, plan, replace(request, post=post)).logits, post).logps
            largest = float(logits.abs().max())
    except Exception as error:  # whatever is raised means that the model's own logits must be used
        return _Head(False, reason=f"the fused head failed: {str(error).splitlines()[0] if str(error) else error!r}")
    gap, allowed = float((plain - fused).abs().max()), 2 * precision.tolerance(largest)
    if gap > allowed:
        return _Head(False, reason=f"the fused head differs from the model's logits by {gap:.2g} nats")
    return _Head(True, post)


def _declared(base: Any) -> PostHead:
    """What the configuration says happens after the head."""
    config = text_config(base)
    softcap = getattr(config, "final_logit_softcapping", None)
    if config.model_type.startswith("cohere"):
        return PostHead(float(config.logit_scale), softcap)
    if config.model_type.startswith("granite"):
        return PostHead(1.0 / config.logits_scaling, softcap)
    return PostHead(1.0, softcap)

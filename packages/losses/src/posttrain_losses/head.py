"""The fused head: hidden states to log-probabilities without ever holding the logits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain_losses.tiles import Gradients, Scores, Transform, gradients, no_autocast, score, score_with_gradients


class TokenScores(NamedTuple):
    """What the head says about each target token, in nats; every field has the shape of `targets`.

    Attributes:
        logps: log-probability of the target, float32 (float64 for float64 inputs).
        entropy: entropy of the softmax, same dtype; None unless asked for.
        top1: bool, whether the target has the highest logit (a tie counts).
        collision: collision entropy of the softmax, same dtype, no gradient; None unless asked for.

    Example:
        >>> import torch
        >>> scores = token_scores(torch.eye(3), 100 * torch.eye(3), torch.tensor([0, 1, 0]))
        >>> scores.top1.tolist(), scores.entropy is None
        ([True, True, False], True)
    """

    logps: Tensor
    entropy: Tensor | None
    top1: Tensor
    collision: Tensor | None = None


class WeightedSum(NamedTuple):
    """A weighted sum of log-probabilities and the scores it came from.

    Attributes:
        total: scalar, differentiable in hidden, weight and bias.
        scores: `TokenScores` of every token, detached.

    Example:
        >>> import torch
        >>> result = weighted_logp_sum(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([1, 5]), torch.ones(2))
        >>> round(result.total.item(), 4), round(result.scores.logps[0].item(), 4)
        (-4.1589, -2.0794)
    """

    total: Tensor
    scores: TokenScores


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    entropy: bool = False,
    collision: bool = False,
) -> TokenScores:
    r"""Log-probability, entropy and top-1 of target tokens straight from hidden states.

    $$z = (h W^\top + b) \cdot \text{scale},\quad
      \ell = \tfrac{1}{\text{temperature}}\,\text{softcap}\tanh(z / \text{softcap}),\quad
      \log p_t = \ell_t - \log\sum_v e^{\ell_v},\quad
      \mathcal{H} = -\sum_v p_v \log p_v$$

    (without `softcap`, $\ell = z / \text{temperature}$). Logits exist one tile at a time, in the forward and, computed
    again, in the backward: beyond inputs, outputs and gradients the peak stays under one twentieth of the full float32
    logits at N >= 8,192. `logps` and `entropy` are differentiable in `hidden`, `weight` and `bias`, once.

    Logits, softmax and accumulators are float32 (float64 if an input is float64) whatever the inputs' dtype. Products
    read their operands in float32; on CUDA bfloat16 and float16 operands, and float32 ones under autocast, are
    multiplied in the low precision with float32 results. On other devices autocast has no effect here. Gradients have
    the dtype of their inputs.

    Args:
        hidden: `(N, H)`.
        weight: `(V, H)`, a plain local tensor (gather a sharded one first).
        targets: `(N,)` integer ids in [0, V). An id outside gives a NaN log-probability, on every device.
        bias: `(V,)` or None.
        softcap: soft-cap of the logits (Gemma's `final_logit_softcapping`); None or 0 for none.
        scale: logit scale (Cohere's `logit_scale`).
        temperature: sampling temperature, > 0.
        entropy: whether to compute entropies, at a small cost.
        collision: whether to compute collision entropies $-\log\sum_v p_v^2$, without gradient, at a small cost: what
            `preference.wpo_weights` needs.

    Raises:
        ValueError: on shapes that do not fit, non-integer targets, or constants out of range.

    Example:
        >>> import torch
        >>> hidden = torch.zeros(3, 4, requires_grad=True)
        >>> scores = token_scores(hidden, torch.ones(10, 4), torch.tensor([0, 1, 2]), entropy=True)
        >>> [round(x, 4) for x in scores.logps.tolist()], round(scores.entropy[0].item(), 4)
        ([-2.3026, -2.3026, -2.3026], 2.3026)

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009, for the recomputed
        tiles; the gradient of the entropy is $\partial\mathcal{H}/\partial\ell_v = -p_v(\log p_v + \mathcal{H})$.
    """
    _check(hidden, weight, targets, bias, softcap, scale, temperature)
    how = _transform(hidden, weight, bias, softcap, scale, temperature)
    scored = _TokenScores.apply(hidden, weight, bias, targets, how, entropy, collision)
    return TokenScores(*scored[:3], scored[4])


def weighted_logp_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    reweight: Callable[[Tensor], Tensor] | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    entropy: bool = False,
) -> WeightedSum:
    r"""Sum of log-probabilities with weights known beforehand; its head gradients are made in the forward.

    $$\text{total} = \sum_i w_i\, \mathrm{sg}[r(\log p_i)]\, \log p_i$$

    where sg stops the gradient and r is `reweight` (1 without). As the sum is linear in the log-probabilities, the
    gradient of each tile of logits is known as soon as the tile is: with float32 or float64 products no logit is
    computed twice, and the backward only scales. With a weight or products in low precision the gradients are made in
    the forward from a second pass over tiles, which avoids a float32 copy of the weight's gradient.

    For masked tokens give weight 0 and any valid target, or leave them out. Everything else, dtypes and memory
    included, is as in `token_scores`.

    Args:
        hidden: `(N, H)`.
        weight: `(V, H)`, a plain local tensor.
        targets: `(N,)` integer ids in [0, V).
        weights: `(N,)`, used detached.
        reweight: element-wise function of log-probabilities `(n,)`, called on a few tokens at a time and not
            differentiated: `torch.exp` gives `dft`.
        bias: `(V,)` or None.
        softcap: soft-cap of the logits; None or 0 for none.
        scale: logit scale.
        temperature: sampling temperature, > 0.
        entropy: whether `scores` has entropies (detached).

    Raises:
        ValueError: on shapes that do not fit, non-integer targets, or constants out of range.
        RuntimeError: on a second backward when the first did not retain the graph.

    Example:
        >>> import torch
        >>> hidden = torch.zeros(2, 4, requires_grad=True)
        >>> head = torch.zeros(8, 4, requires_grad=True)
        >>> loss = -weighted_logp_sum(hidden, head, torch.tensor([1, 5]), torch.tensor([0.5, 0.5])).total
        >>> loss.backward()
        >>> round(loss.item(), 4), tuple(head.grad.shape)
        (2.0794, (8, 4))

    Source: gradients in the forward as in Hsu et al., "Liger Kernel", arXiv 2410.10989; `reweight=torch.exp` as in
        Wu et al., "On the Generalization of SFT", arXiv 2508.05629.
    """
    _check(hidden, weight, targets, bias, softcap, scale, temperature)
    if weights.shape != targets.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; give one per target, {tuple(targets.shape)}")
    how = _transform(hidden, weight, bias, softcap, scale, temperature)
    inputs = (hidden, weight, bias)
    needs = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs)
    total, *scores = _WeightedSum.apply(*inputs, targets, weights.detach(), reweight, how, entropy, needs)[:4]
    return WeightedSum(total, TokenScores(*scores))


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(hidden, weight, bias, targets, how, entropy, collision):
        with no_autocast(hidden.device):
            return tuple(score(hidden, weight, bias, targets, how, entropy, collision))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        hidden, weight, bias, targets, ctx.how, *_ = inputs
        _, entropy, top1, lse, collision = output
        ctx.mark_non_differentiable(top1, lse, *(() if collision is None else (collision,)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, top1, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps, grad_entropy, *_):
        if grad_logps is None and grad_entropy is None:
            return (None,) * 7
        hidden, weight, bias, targets, entropy, top1, lse = ctx.saved_tensors
        scores = Scores(lse, entropy, top1, lse)
        needs = ctx.needs_input_grad[:3]
        with no_autocast(hidden.device):
            grads = gradients(hidden, weight, bias, targets, scores, grad_logps, grad_entropy, needs, ctx.how)
        return (*grads, None, None, None, None)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(hidden, weight, bias, targets, weights, reweight, how, entropy, needs):
        weights = weights.to(how.compute)

        def weigh(logps: Tensor, start: int, stop: int) -> Tensor:
            part = weights[start:stop]
            return part if reweight is None else part * reweight(logps).to(how.compute)

        head = (hidden, weight, bias, targets)
        grads = Gradients(None, None, None)
        with no_autocast(hidden.device):
            if any(needs) and weight.dtype == how.operand == how.compute and hidden.shape[0]:
                scores, factors, grads = score_with_gradients(*head, weigh, needs, how, entropy)
            else:
                scores = score(*head, how, entropy)
                factors = weigh(scores.logps, 0, hidden.shape[0])
                if any(needs):
                    grads = gradients(*head, scores, factors, None, needs, how)
        # Not a product alone: 0 * -inf at a token of no weight is NaN.
        total = torch.where(factors == 0, 0.0, factors * scores.logps).sum()
        return total, *scores[:3], *grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        others = [x for x in output[1:] if x is not None]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        ctx.grads = output[4:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total, *_):
        if grad_total is None:
            return (None,) * 9
        if ctx.grads is None:
            raise RuntimeError(
                "the head gradients of this weighted_logp_sum were used by its first backward: "
                "give that one retain_graph=True"
            )
        if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():  # ty: ignore[possibly-missing-submodule]
            return (*(None if g is None else g * grad_total for g in ctx.grads), *(None,) * 6)
        # Scaled in place and let go, so that autograd can adopt them as .grad without a copy.
        grads, ctx.grads = ctx.grads, None
        return (*(None if g is None else g.mul_(grad_total) for g in grads), *(None,) * 6)


def _transform(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float, temperature: float
) -> Transform:
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    compute = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    operand, kind = compute, hidden.device.type
    if kind == "cuda" and compute == torch.float32:  # the one device with low-precision products of float32 result
        autocast = torch.is_autocast_enabled(kind)
        operand = torch.get_autocast_dtype(kind) if autocast else torch.promote_types(hidden.dtype, weight.dtype)
    return Transform(softcap or None, float(scale), float(temperature), operand, compute)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    temperature: float,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; give (N, H) and (V, H), "
            "flattening batch and time with hidden.flatten(0, -2)"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; give one id per row of hidden, {tuple(hidden.shape[:1])}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets has dtype {targets.dtype}; give int64 token ids, targets.long()")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; give one value per row of weight, ({weight.shape[0]},)")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}; give a finite value above 0")
    if softcap is not None and not (softcap >= 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap is {softcap}; give a finite value above 0, or None for no soft-cap")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; give a finite value")

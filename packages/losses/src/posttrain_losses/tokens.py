"""Losses as functions of per-token log-probabilities: one value per token, never reduced."""

import torch
from torch import Tensor


def token_logps(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Log-probability of each target under full logits, $\ell_t - \log\sum_v e^{\ell_v}$, in nats.

    The plain form, for logits that exist anyway; `token_scores` needs none.

    Args:
        logits: `(..., V)`; low precision is raised to float32.
        targets: `(...)` integer ids in [0, V).

    Returns:
        `(...)`, float32 (float64 for float64 logits), differentiable in `logits`.

    Raises:
        ValueError: if `targets` is not `logits` without its last dimension.

    Example:
        >>> import torch
        >>> token_logps(torch.zeros(2, 4), torch.tensor([0, 3])).tolist()
        [-1.3862943649291992, -1.3862943649291992]
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; give one id per row of logits, {tuple(logits.shape[:-1])}"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = logits.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(-1)


def nll(logps: Tensor) -> Tensor:
    r"""Negative log-likelihood of each token, $-\log p$, in nats.

    Args:
        logps: log-probabilities, any shape.

    Returns:
        One loss per token, the shape of `logps`.

    Example:
        >>> import torch
        >>> nll(torch.tensor([-0.5, -2.0])).tolist()
        [0.5, 2.0]
    """
    return -logps


def dft(logps: Tensor) -> Tensor:
    r"""Dynamic fine-tuning loss of each token, $-\mathrm{sg}[p]\,\log p$: likely tokens weigh more than in `nll`.

    Args:
        logps: log-probabilities, any shape.

    Returns:
        One loss per token, the shape of `logps`; the factor p has no gradient.

    Example:
        >>> import torch
        >>> [round(x, 4) for x in dft(torch.tensor([-0.5, -2.0])).tolist()]
        [0.3033, 0.2707]

    Source: Wu et al., "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
        arXiv 2508.05629.
    """
    return -(logps.detach().exp() * logps)


def masked_mean(values: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    r"""Mean of the values where `mask` is True, along `dim`; 0 where nothing is.

    What lies under a False mask, NaN included, reaches neither the mean nor the gradient.

    Args:
        values: any shape, floating.
        mask: bool (or 0 and 1), broadcastable to `values`.
        dim: dimension to average over.

    Returns:
        `values` without `dim`.

    Example:
        >>> import torch
        >>> masked_mean(torch.tensor([[1.0, 3.0, 9.0], [5.0, 5.0, 5.0]]), torch.tensor([[1, 1, 0], [0, 0, 0]])).tolist()
        [2.0, 0.0]
    """
    mask = mask.bool().expand_as(values)
    return torch.where(mask, values, 0).sum(dim) / mask.sum(dim).clamp_min(1)

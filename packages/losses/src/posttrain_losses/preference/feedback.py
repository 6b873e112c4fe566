"""Losses of single completions labelled good or bad."""

import torch
from torch import Tensor

from posttrain_losses.preference.pairs import widen


def kto_loss(
    ratios: Tensor,
    labels: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    r"""Kahneman-Tversky optimisation: value of a completion relative to a reference point.

    $$w_d\,(1 - \sigma(\beta (l - z))) \text{ if desirable},\quad w_u\,(1 - \sigma(\beta (z - l))) \text{ otherwise}$$

    with the log-ratio $l = \log\pi(y \mid x) - \log\pi_\text{ref}(y \mid x)$ and z an estimate of the KL divergence of
    policy and reference, not below 0: the mean log-ratio of completions paired with the prompts of others, over all
    rows of an optimiser step.

    Args:
        ratios: log-ratios `(P,)`, sums over tokens.
        labels: `(P,)` bool, True for desirable.
        kl: z, a scalar; a constant for the gradient.
        beta: strength of the reference.
        desirable_weight: $w_d$.
        undesirable_weight: $w_u$; the paper wants $w_d n_d / (w_u n_u)$ of the rows' numbers within [1, 4/3].

    Returns:
        `(P,)`, float32 or wider.

    Raises:
        ValueError: if `labels` has another shape than `ratios`.

    Example:
        >>> import torch
        >>> kto_loss(torch.tensor([0.0, 0.0]), torch.tensor([True, False]), 0.0, desirable_weight=2.0).tolist()
        [1.0, 0.5]

    Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306.
    """
    if labels.shape != ratios.shape:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; give one per completion, {tuple(ratios.shape)}")
    labels = labels.bool()
    gain = widen(ratios) - (kl.detach() if isinstance(kl, Tensor) else kl)
    # 1 - sigmoid(x) has no digits left at large x; sigmoid(-x) has.
    surprise = (beta * torch.where(labels, -gain, gain)).sigmoid()
    return torch.where(labels, desirable_weight * surprise, undesirable_weight * surprise)


def apo_zero_unpaired(
    ratios: Tensor,
    labels: Tensor,
    kl: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    r"""Anchored preference optimisation on labelled completions: `kto_loss` with the reference point at 0.

    $$w_d\,(1 - \sigma(\beta l)) \text{ if desirable},\quad w_u\,\sigma(\beta l) \text{ otherwise}$$

    Args:
        ratios: log-ratios of policy and reference `(P,)`, sums over tokens.
        labels: `(P,)` bool, True for desirable.
        kl: has no effect; there so that it is called as `kto_loss` is.
        beta: strength of the reference.
        desirable_weight: $w_d$.
        undesirable_weight: $w_u$.

    Returns:
        `(P,)`, float32 or wider.

    Raises:
        ValueError: if `labels` has another shape than `ratios`.

    Example:
        >>> import torch
        >>> apo_zero_unpaired(torch.tensor([0.0, 0.0]), torch.tensor([True, False])).tolist()
        [0.5, 0.5]

    Source: D'Oosterlinck et al., "Anchored Preference Optimization and Contrastive Revisions", arXiv 2408.06266,
        equation 7, one term per completion.
    """
    del kl
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    return kto_loss(ratios, labels, 0.0, beta=beta, **weights)

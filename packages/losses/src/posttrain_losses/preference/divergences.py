"""What a log-ratio is worth under an f-divergence from the reference: f'(exp(log-ratio))."""

import math

from torch import Tensor
from torch.nn import functional

from posttrain_losses.preference.pairs import widen

LIMIT = 80.0  # exp stays within float32


def reverse_kl(ratios: Tensor) -> Tensor:
    r"""Score of log-ratios under the reverse KL divergence, the one of DPO: $f'(e^l) = l$, but for a constant.

    Args:
        ratios: log-ratios $l$ of policy and reference, any shape.

    Returns:
        Scores of the same shape, float32 or wider.

    Example:
        >>> import torch
        >>> reverse_kl(torch.tensor([-1.0, 2.0])).tolist()
        [-1.0, 2.0]

    Source: Wang et al., "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence
        Constraints", arXiv 2309.16240, table 1.
    """
    return widen(ratios)


def forward_kl(ratios: Tensor) -> Tensor:
    r"""Score of log-ratios under the forward KL divergence: $f'(e^l) = 1 - e^{-l}$, but for a constant.

    The exponent is limited to 80; beyond, the score is constant.

    Args:
        ratios: log-ratios $l$ of policy and reference, any shape.

    Returns:
        Scores of the same shape, float32 or wider.

    Example:
        >>> import torch
        >>> forward_kl(torch.tensor([0.5, 1.0, 2.0]).log()).tolist()
        [-1.0, 0.0, 0.5]

    Source: Wang et al., arXiv 2309.16240, table 1.
    """
    return -(-widen(ratios)).clamp_max(LIMIT).expm1()


def js_divergence(ratios: Tensor) -> Tensor:
    r"""Score of log-ratios under the Jensen-Shannon divergence: $f'(e^l) = \log 2 + \log\sigma(l)$.

    Args:
        ratios: log-ratios $l$ of policy and reference, any shape.

    Returns:
        Scores of the same shape, float32 or wider, below log 2.

    Example:
        >>> import torch
        >>> js_divergence(torch.tensor([0.0, 1000.0])).tolist()
        [0.0, 0.6931471824645996]

    Source: Wang et al., arXiv 2309.16240, table 1.
    """
    return math.log(2) + functional.logsigmoid(widen(ratios))


def alpha_divergence(ratios: Tensor, alpha: float = 0.5) -> Tensor:
    r"""Score of log-ratios under an alpha divergence: $f'(e^l) = (e^{(\alpha - 1) l} - 1) / (\alpha - 1)$.

    Alpha 1 is `reverse_kl`, 0 is `forward_kl`. The paper's alpha is 1 minus this one. The exponent is limited to 80;
    beyond, the score is constant. Set it with `functools.partial(alpha_divergence, alpha=0.3)`.

    Args:
        ratios: log-ratios $l$ of policy and reference, any shape.
        alpha: order of the divergence.

    Returns:
        Scores of the same shape, float32 or wider.

    Example:
        >>> import torch
        >>> alpha_divergence(torch.tensor([0.25, 1.0, 4.0]).log()).tolist()
        [-2.0, 0.0, 1.0]

    Source: Wang et al., arXiv 2309.16240, table 1.
    """
    power = alpha - 1.0
    if abs(power) < 1e-6:
        return reverse_kl(ratios)
    return (power * widen(ratios)).clamp_max(LIMIT).expm1() / power

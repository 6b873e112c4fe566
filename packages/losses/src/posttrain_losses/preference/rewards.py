"""Losses of a reward model on preference pairs."""

from torch import Tensor
from torch.nn import functional

from posttrain_losses.preference.pairs import same_shape


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margins: Tensor | None = None) -> Tensor:
    r"""Negative log-likelihood of a preference under the Bradley-Terry model, $-\log\sigma(r_c - r_r - m)$.

    Args:
        chosen: rewards of the chosen completions `(P,)`.
        rejected: of the rejected ones.
        margins: by how much a chosen reward should exceed its rejected one `(P,)`; None for 0.

    Returns:
        `(P,)`, float32 or wider.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> loss = bradley_terry_loss(torch.tensor([1.0, 1.0]), torch.tensor([1.0, -2.0]), torch.tensor([0.0, 3.0]))
        >>> [round(x, 4) for x in loss.tolist()]
        [0.6931, 0.6931]

    Source: Ouyang et al., "Training language models to follow instructions with human feedback", arXiv 2203.02155;
        margins as in Touvron et al., "Llama 2", arXiv 2307.09288, section 3.2.2.
    """
    chosen, rejected, *rest = same_shape(
        chosen=chosen, rejected=rejected, **({} if margins is None else {"margins": margins})
    )
    gap = chosen - rejected
    return -functional.logsigmoid(gap - rest[0] if rest else gap)


def reward_centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    r"""Penalty that keeps rewards around 0, $(r_c + r_r)^2$: the likelihood alone leaves their level open.

    Add it to `bradley_terry_loss` with a small coefficient, such as 0.01.

    Args:
        chosen: rewards of the chosen completions `(P,)`.
        rejected: of the rejected ones.

    Returns:
        `(P,)`, float32 or wider.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> reward_centering(torch.tensor([2.0, 3.0]), torch.tensor([-2.0, 1.0])).tolist()
        [0.0, 16.0]

    Source: Eisenstein et al., "Helping or Herding? Reward Model Ensembles Mitigate but do not Eliminate Reward
        Hacking", arXiv 2312.09244.
    """
    chosen, rejected = same_shape(chosen=chosen, rejected=rejected)
    return (chosen + rejected).square()

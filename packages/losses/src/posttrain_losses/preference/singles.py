"""Losses of a pair that judge each completion by itself."""

from torch import Tensor
from torch.nn import functional

from posttrain_losses.preference.pairs import Pairs


def nca_pair(pairs: Pairs, beta: float = 0.1) -> Tensor:
    r"""Noise contrastive alignment: the chosen completion becomes likelier, both are held back.

    $$-\log\sigma(\beta l_c) - \tfrac12\log\sigma(-\beta l_c) - \tfrac12\log\sigma(-\beta l_r)$$

    Args:
        pairs: with a reference; $l$ is the log-ratio of policy and reference.
        beta: strength of the reference.

    Returns:
        `(P,)`.

    Example:
        >>> import torch
        >>> round(nca_pair(Pairs(*torch.zeros(4, 1))).item(), 4)  # 2 ln 2
        1.3863

    Source: Chen et al., "Noise Contrastive Alignment of Language Models with Explicit Rewards", arXiv 2402.05369.
    """
    chosen, rejected = (beta * ratio for ratio in pairs.ratios())
    held = functional.logsigmoid(-chosen) + functional.logsigmoid(-rejected)
    return -functional.logsigmoid(chosen) - 0.5 * held


def bco_pair(pairs: Pairs, beta: float = 0.1) -> Tensor:
    r"""Binary classifier optimisation on pairs, without the running shift of rewards.

    $$-\log\sigma(\beta l_c) - \log\sigma(-\beta l_r)$$

    Args:
        pairs: with a reference; $l$ is the log-ratio of policy and reference.
        beta: strength of the reference.

    Returns:
        `(P,)`.

    Example:
        >>> import torch
        >>> round(bco_pair(Pairs(*torch.zeros(4, 1))).item(), 4)  # 2 ln 2
        1.3863

    Source: Jung et al., "Binary Classifier Optimization for Large Language Model Alignment", arXiv 2404.04656.
    """
    chosen, rejected = pairs.ratios()
    return -functional.logsigmoid(beta * chosen) - functional.logsigmoid(-beta * rejected)


def sppo_hard(pairs: Pairs, beta: float = 0.1) -> Tensor:
    r"""Self-play preference optimisation with win probabilities of 1 and 0: log-ratios become $\pm 1 / (2\beta)$.

    $$\Big(l_c - \frac{1}{2\beta}\Big)^2 + \Big(l_r + \frac{1}{2\beta}\Big)^2$$

    Args:
        pairs: with a reference; $l$ is the log-ratio of policy and reference.
        beta: the inverse of the paper's $\eta$.

    Returns:
        `(P,)`.

    Example:
        >>> import torch
        >>> sppo_hard(Pairs(*torch.zeros(4, 1)), beta=0.5).tolist()
        [2.0]

    Source: Wu et al., "Self-Play Preference Optimization for Language Model Alignment", arXiv 2405.00675, equation 4.7.
    """
    chosen, rejected = pairs.ratios()
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero(pairs: Pairs, beta: float = 0.1) -> Tensor:
    r"""Anchored preference optimisation for chosen completions better than the model's own: chosen up, rejected down.

    $$1 - \sigma(\beta l_c) + \sigma(\beta l_r)$$

    Args:
        pairs: with a reference; $l$ is the log-ratio of policy and reference.
        beta: strength of the reference.

    Returns:
        `(P,)`, within (0, 2).

    Example:
        >>> import torch
        >>> apo_zero(Pairs(*torch.zeros(4, 1))).tolist()
        [1.0]

    Source: D'Oosterlinck et al., "Anchored Preference Optimization and Contrastive Revisions", arXiv 2408.06266,
        equation 7.
    """
    chosen, rejected = pairs.ratios()
    # sigmoid(-x), as 1 - sigmoid(x) has no digits left at large x.
    return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down(pairs: Pairs, beta: float = 0.1) -> Tensor:
    r"""Anchored preference optimisation for chosen completions worse than the model's own: both down, rejected more.

    $$\sigma(\beta l_c) + 1 - \sigma(\beta (l_c - l_r))$$

    Args:
        pairs: with a reference; $l$ is the log-ratio of policy and reference.
        beta: strength of the reference.

    Returns:
        `(P,)`, within (0, 2).

    Example:
        >>> import torch
        >>> apo_down(Pairs(*torch.zeros(4, 1))).tolist()
        [1.0]

    Source: D'Oosterlinck et al., arXiv 2408.06266, equation 8.
    """
    chosen, rejected = pairs.ratios()
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


def sft(pairs: Pairs, beta: float = 0.1) -> Tensor:
    r"""Negative log-likelihood of the chosen completion, summed over its tokens: $-\log\pi(y_c \mid x)$.

    Its count is tokens, not pairs: divide the sum by `chosen_lengths.sum()`. It reads neither reference nor lengths,
    and is meant for plain sums of log-probabilities, not those of `length_desensitised_sum`.

    Args:
        pairs: `chosen_logps` alone matters.
        beta: has no effect; there so that every loss of pairs is called alike.

    Returns:
        `(P,)`, in nats.

    Example:
        >>> import torch
        >>> sft(Pairs(torch.tensor([-12.0, -3.0]), torch.tensor([-5.0, -7.0]))).tolist()
        [12.0, 3.0]

    Source: as a term beside DPO, Pang et al., "Iterative Reasoning Preference Optimization", arXiv 2404.19733, and Wang
        et al., "Enhancing the Reasoning Ability of Multimodal Large Language Models via Mixed Preference
        Optimization", arXiv 2411.10442.
    """
    del beta
    return -pairs.logps()[0]

"""Losses of the difference between the two completions of a pair: DPO and its variants."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from posttrain_losses.preference.divergences import reverse_kl
from posttrain_losses.preference.pairs import Pairs


def _scores(pairs: Pairs, divergence: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    chosen, rejected = pairs.ratios()
    return divergence(chosen), divergence(rejected)


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of the preference's probability with a label that is wrong at a rate of `label_smoothing`."""
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}; give the rate of wrong labels, from 0 to 0.5 (which learns nothing)"
        )
    loss = -functional.logsigmoid(logits)
    # -(1 - e) log sigmoid(z) - e log sigmoid(-z), as log sigmoid(-z) = log sigmoid(z) - z.
    return loss + label_smoothing * logits if label_smoothing else loss


def sigmoid(
    pairs: Pairs,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    divergence: Callable[[Tensor], Tensor] = reverse_kl,
) -> Tensor:
    r"""Direct preference optimisation (DPO), with label smoothing conservative DPO.

    $$-(1 - \epsilon)\log\sigma(\beta D) - \epsilon\log\sigma(-\beta D),\quad D = s_c - s_r$$

    where $s$ is the divergence's score of the log-ratio $\log\pi(y \mid x) - \log\pi_\text{ref}(y \mid x)$.

    Args:
        pairs: with a reference.
        beta: strength of the reference.
        label_smoothing: $\epsilon$, the rate of wrong labels.
        divergence: `reverse_kl`, `forward_kl`, `js_divergence` or a partial `alpha_divergence`.

    Returns:
        `(P,)`, ln 2 where policy and reference are the same.

    Raises:
        ValueError: if `label_smoothing` is outside [0, 0.5], or the pairs lack a reference.

    Example:
        >>> import torch
        >>> pairs = Pairs(*torch.tensor([[-10.0, -15.0, -10.0, -15.0], [-9.0, -20.0, -10.0, -15.0]]).T)
        >>> [round(x, 4) for x in sigmoid(pairs, beta=0.5).tolist()]
        [0.6931, 0.0486]

    Source: Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290, equation 7; Mitchell, "A note on DPO
        with noisy preferences and relationship to IPO", 2023; divergences: Wang et al., arXiv 2309.16240.
    """
    chosen, rejected = _scores(pairs, divergence)
    return _smoothed(beta * (chosen - rejected), label_smoothing)


def sigmoid_norm(
    pairs: Pairs,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    divergence: Callable[[Tensor], Tensor] = reverse_kl,
) -> Tensor:
    r"""DPO with each score averaged over its completion's tokens: `sigmoid` with $D = s_c / |y_c| - s_r / |y_r|$.

    Args:
        pairs: with a reference and lengths.
        beta: strength of the reference; larger than in `sigmoid`, such as 5, as averages are small.
        label_smoothing: rate of wrong labels.
        divergence: as in `sigmoid`.

    Returns:
        `(P,)`, ln 2 where policy and reference are the same.

    Raises:
        ValueError: if `label_smoothing` is outside [0, 0.5], or the pairs lack a reference or lengths.

    Example:
        >>> import torch
        >>> pairs = Pairs(*torch.tensor([[-9.0, -20.0, -10.0, -15.0, 4.0, 10.0]]).T)
        >>> round(sigmoid_norm(pairs, beta=2.0).item(), 4)  # D = 1/4 + 5/10
        0.2014

    Source: Lambert et al., "Tulu 3: Pushing Frontiers in Open Language Model Post-Training", arXiv 2411.15124.
    """
    chosen, rejected = pairs.per_token(*_scores(pairs, divergence))
    return _smoothed(beta * (chosen - rejected), label_smoothing)


def simpo(pairs: Pairs, beta: float = 2.0, *, gamma: float = 0.5) -> Tensor:
    r"""Simple preference optimisation: average log-probabilities, a target margin and no reference.

    $$-\log\sigma\Big(\frac{\beta}{|y_c|}\log\pi(y_c \mid x) - \frac{\beta}{|y_r|}\log\pi(y_r \mid x) - \gamma\Big)$$

    Args:
        pairs: with lengths; the reference is not read.
        beta: scale of the rewards.
        gamma: by how much the chosen reward should exceed the rejected one.

    Returns:
        `(P,)`.

    Raises:
        ValueError: if the pairs lack lengths.

    Example:
        >>> import torch
        >>> pairs = Pairs(torch.tensor([-4.0]), torch.tensor([-5.0]), None, None, torch.tensor([4]), torch.tensor([4]))
        >>> round(simpo(pairs).item(), 4)  # 2 * 0.25 is the margin
        0.6931

    Source: Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv 2405.14734,
        equation 6.
    """
    chosen, rejected = pairs.per_token(*pairs.logps())
    return -functional.logsigmoid(beta * (chosen - rejected) - gamma)


def hinge(pairs: Pairs, beta: float = 0.1, *, divergence: Callable[[Tensor], Tensor] = reverse_kl) -> Tensor:
    r"""Hinge loss of the difference of scores, $\max(0, 1 - \beta D)$ with D as in `sigmoid`.

    Args:
        pairs: with a reference.
        beta: the inverse of the margin.
        divergence: as in `sigmoid`.

    Returns:
        `(P,)`, 1 where policy and reference are the same.

    Example:
        >>> import torch
        >>> pairs = Pairs(*torch.tensor([[-9.0, -20.0, -10.0, -15.0]]).T)
        >>> hinge(pairs, beta=0.125).tolist(), hinge(pairs, beta=1.0).tolist()
        ([0.25], [0.0])

    Source: Zhao et al., "SLiC-HF", arXiv 2305.10425, as in Liu et al., "Statistical Rejection Sampling Improves
        Preference Optimization", arXiv 2309.06657.
    """
    chosen, rejected = _scores(pairs, divergence)
    return (1 - beta * (chosen - rejected)).relu()


def ipo(pairs: Pairs, beta: float = 0.1, *, divergence: Callable[[Tensor], Tensor] = reverse_kl) -> Tensor:
    r"""Identity preference optimisation: the difference of scores becomes $1 / (2\beta)$ and no more.

    $$\Big(\frac{s_c}{|y_c|} - \frac{s_r}{|y_r|} - \frac{1}{2\beta}\Big)^2$$

    Averages over tokens, as in the experiments of the paper, make beta comparable over lengths.

    Args:
        pairs: with a reference and lengths.
        beta: the paper's $\tau$.
        divergence: as in `sigmoid`.

    Returns:
        `(P,)`.

    Raises:
        ValueError: if the pairs lack a reference or lengths.

    Example:
        >>> import torch
        >>> pairs = Pairs(*torch.tensor([[-9.0, -20.0, -10.0, -15.0, 4.0, 10.0]]).T)
        >>> ipo(pairs, beta=0.5).tolist()  # 1/4 + 5/10 is 1/4 short of 1
        [0.0625]

    Source: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences", arXiv
        2310.12036, equation 17.
    """
    chosen, rejected = pairs.per_token(*_scores(pairs, divergence))
    return (chosen - rejected - 1 / (2 * beta)).square()


def exo_pair(
    pairs: Pairs,
    beta: float = 0.1,
    *,
    label_smoothing: float = 1e-3,
    divergence: Callable[[Tensor], Tensor] = reverse_kl,
) -> Tensor:
    r"""Efficient exact optimisation: the reverse KL divergence from the smoothed preference.

    $$q\,(\log q - \log(1 - \epsilon)) + (1 - q)\,(\log(1 - q) - \log\epsilon),\quad q = \sigma(\beta D)$$

    with D as in `sigmoid`. It is 0 where q reaches $1 - \epsilon$.

    Args:
        pairs: with a reference.
        beta: strength of the reference.
        label_smoothing: $\epsilon$, above 0.
        divergence: as in `sigmoid`.

    Returns:
        `(P,)`.

    Raises:
        ValueError: if `label_smoothing` is outside (0, 0.5], or the pairs lack a reference.

    Example:
        >>> import torch
        >>> exo_pair(Pairs(*torch.zeros(4, 1)), label_smoothing=0.5).tolist()
        [0.0]

    Source: Ji et al., "Towards Efficient Exact Optimization of Language Model Alignment", arXiv 2402.00856,
        equation 16.
    """
    if not 0 < label_smoothing <= 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}; exo_pair needs one above 0 and up to 0.5, such as 1e-3"
        )
    chosen, rejected = _scores(pairs, divergence)
    logits = beta * (chosen - rejected)
    win = logits.sigmoid() * (functional.logsigmoid(logits) - math.log1p(-label_smoothing))
    return win + (-logits).sigmoid() * (functional.logsigmoid(-logits) - math.log(label_smoothing))


def robust(
    pairs: Pairs,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    divergence: Callable[[Tensor], Tensor] = reverse_kl,
) -> Tensor:
    r"""DPO without bias under a known rate of wrong labels: its mean over wrong labels is the loss of right ones.

    $$\frac{-(1 - \epsilon)\log\sigma(\beta D) + \epsilon\log\sigma(-\beta D)}{1 - 2\epsilon}$$

    with D as in `sigmoid`.

    Args:
        pairs: with a reference.
        beta: strength of the reference.
        label_smoothing: $\epsilon$, the rate of wrong labels.
        divergence: as in `sigmoid`.

    Returns:
        `(P,)`, ln 2 where policy and reference are the same; unbounded below for $\epsilon > 0$.

    Raises:
        ValueError: if `label_smoothing` is outside [0, 0.5), or the pairs lack a reference.

    Example:
        >>> import torch
        >>> round(robust(Pairs(*torch.zeros(4, 1)), label_smoothing=0.25).item(), 4)
        0.6931

    Source: Chowdhury et al., "Provably Robust DPO: Aligning Language Models with Noisy Feedback", arXiv 2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; robust needs the rate of wrong labels, below 0.5")
    chosen, rejected = _scores(pairs, divergence)
    logits = beta * (chosen - rejected)
    # log sigmoid(-z) = log sigmoid(z) - z takes the two terms of one size out of the quotient.
    return -functional.logsigmoid(logits) - label_smoothing / (1 - 2 * label_smoothing) * logits


def discopop(
    pairs: Pairs, beta: float = 0.1, *, tau: float = 0.05, divergence: Callable[[Tensor], Tensor] = reverse_kl
) -> Tensor:
    r"""Discovered preference optimisation: a blend of logistic and exponential loss, by the log-ratio itself.

    $$-(1 - m)\log\sigma(z) + m\,e^{-z},\quad z = \beta D,\quad m = \sigma(z / \tau)$$

    with D as in `sigmoid`.

    Args:
        pairs: with a reference.
        beta: strength of the reference.
        tau: temperature of the blend.
        divergence: as in `sigmoid`.

    Returns:
        `(P,)`.

    Example:
        >>> import torch
        >>> round(discopop(Pairs(*torch.zeros(4, 1))).item(), 4)  # (ln 2 + 1) / 2
        0.8466

    Source: Lu et al., "Discovering Preference Optimization Algorithms with and for Large Language Models", arXiv
        2406.08414, equation 5.
    """
    chosen, rejected = _scores(pairs, divergence)
    logits = beta * (chosen - rejected)
    # The blend's logarithm within the exponent: at logits far below 0 it tends to 0 times infinity otherwise.
    exponential = (functional.logsigmoid(logits / tau) - logits).exp()
    return exponential - (-logits / tau).sigmoid() * functional.logsigmoid(logits)


def _by_rank(values: Tensor, others: Tensor, real: Tensor) -> Tensor:
    """For each of the values `(P,)` the one of the others that has its rank; filler is last in both."""
    ranks = torch.where(real, values.detach(), math.inf).argsort(stable=True).argsort()
    order = torch.where(real, others.detach(), math.inf).argsort(stable=True)
    return others.gather(0, order.gather(0, ranks))


def aot(pairs: Pairs, beta: float = 0.1, *, label_smoothing: float = 0.0) -> Tensor:
    r"""Alignment by optimal transport on pairs: the policy's margins should exceed the reference's in distribution.

    $$-(1 - \epsilon)\log\sigma(\beta d_k) - \epsilon\log\sigma(-\beta d_k),\quad d = \text{sort}(\log\pi(y_c) -
      \log\pi(y_r)) - \text{sort}(\log\pi_\text{ref}(y_c) - \log\pi_\text{ref}(y_r))$$

    It couples the rows of a micro-batch: the loss depends on which pairs are in it, and one pair alone gives `sigmoid`.

    Args:
        pairs: with a reference; filler pairs, of length 0, stay among themselves.
        beta: strength of the reference.
        label_smoothing: $\epsilon$, the rate of wrong labels.

    Returns:
        `(P,)`; a pair has the value of the rank of its margin under the policy.

    Raises:
        ValueError: if `label_smoothing` is outside [0, 0.5], or the pairs lack a reference.

    Example:
        >>> import torch
        >>> pairs = Pairs(*torch.tensor([[5.0, 0.0, 1.0, 0.0], [1.0, 0.0, 5.0, 0.0]]).T)
        >>> [round(x, 4) for x in aot(pairs).tolist()]  # margins 5 and 1 on both sides
        [0.6931, 0.6931]

    Source: Melnyk et al., "Distributional Preference Alignment of LLMs via Optimal Transport", arXiv 2406.05882.
    """
    (chosen, rejected), (reference_chosen, reference_rejected) = pairs.logps(), pairs.reference()
    margins = chosen - rejected
    others = _by_rank(margins, reference_chosen - reference_rejected, pairs.real())
    return _smoothed(beta * (margins - others), label_smoothing)


def aot_unpaired(pairs: Pairs, beta: float = 0.1, *, label_smoothing: float = 0.0) -> Tensor:
    r"""Alignment by optimal transport without pairing: chosen log-ratios should exceed rejected ones in distribution.

    $$-(1 - \epsilon)\log\sigma(\beta d_k) - \epsilon\log\sigma(-\beta d_k),\quad d = \text{sort}(l_c) -
      \text{sort}(l_r)$$

    It couples the rows of a micro-batch, as `aot` does.

    Args:
        pairs: with a reference; filler pairs, of length 0, stay among themselves.
        beta: strength of the reference.
        label_smoothing: $\epsilon$, the rate of wrong labels.

    Returns:
        `(P,)`; a pair has the value of the rank of its chosen log-ratio.

    Raises:
        ValueError: if `label_smoothing` is outside [0, 0.5], or the pairs lack a reference.

    Example:
        >>> import torch
        >>> pairs = Pairs(*torch.tensor([[5.0, 1.0, 0.0, 0.0], [1.0, 5.0, 0.0, 0.0]]).T)
        >>> [round(x, 4) for x in aot_unpaired(pairs).tolist()]  # 5 and 1 on both sides
        [0.6931, 0.6931]

    Source: Melnyk et al., arXiv 2406.05882.
    """
    chosen, rejected = pairs.ratios()
    return _smoothed(beta * (chosen - _by_rank(chosen, rejected, pairs.real())), label_smoothing)

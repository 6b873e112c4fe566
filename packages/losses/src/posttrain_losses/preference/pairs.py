"""What a loss of preference pairs reads: sums of log-probabilities, and how they are weighted."""

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain_losses.tokens import masked_mean


def widen(values: Tensor) -> Tensor:
    """Float32, or the dtype itself where that is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def same_shape(**tensors: Tensor) -> list[Tensor]:
    """The tensors, widened; a shape unlike the first one's would broadcast into a matrix of all pairs with all."""
    (first, model), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.shape != model.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; give that of {first}, {tuple(model.shape)}")
    return [widen(tensor) for tensor in tensors.values()]


class Pairs(NamedTuple):
    r"""P preference pairs, each field `(P,)`: the one argument of every loss of pairs.

    With log-probabilities `(P, 2, Tc)` and a mask of that shape, chosen first:
    `Pairs(*logps.sum(-1).unbind(1), *reference_logps.sum(-1).unbind(1), *mask.sum(-1).unbind(1))`.

    Attributes:
        chosen_logps: log-probability of the chosen completion, $\log\pi(y_c \mid x)$: a sum over tokens, in nats.
        rejected_logps: of the rejected one.
        reference_chosen_logps: the same under the reference model; None for losses without a reference.
        reference_rejected_logps: of the rejected completion.
        chosen_lengths: tokens summed over, for losses of averages per token. A pair with a length of 0 is filler.
        rejected_lengths: of the rejected completion.

    Example:
        >>> import torch
        >>> pairs = Pairs(*torch.tensor([[-9.0, -20.0, -10.0, -15.0, 4.0, 10.0]]).T)
        >>> [x.tolist() for x in pairs.ratios()], [x.tolist() for x in pairs.per_token(*pairs.ratios())]
        ([[1.0], [-5.0]], [[0.25], [-0.5]])
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    reference_chosen_logps: Tensor | None = None
    reference_rejected_logps: Tensor | None = None
    chosen_lengths: Tensor | None = None
    rejected_lengths: Tensor | None = None

    def logps(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities `(P,)` of chosen and rejected under the policy, float32 or wider."""
        chosen, rejected = same_shape(chosen_logps=self.chosen_logps, rejected_logps=self.rejected_logps)
        return chosen, rejected

    def reference(self) -> tuple[Tensor, Tensor]:
        """The same under the reference, without gradient; ValueError where there is none."""
        if self.reference_chosen_logps is None or self.reference_rejected_logps is None:
            raise ValueError(
                "reference_chosen_logps or reference_rejected_logps is None: this loss compares with a reference "
                "model; give its log-probabilities, or take a loss that needs none (simpo, sft)"
            )
        _, chosen, rejected = same_shape(
            chosen_logps=self.chosen_logps,
            reference_chosen_logps=self.reference_chosen_logps,
            reference_rejected_logps=self.reference_rejected_logps,
        )
        return chosen.detach(), rejected.detach()

    def ratios(self) -> tuple[Tensor, Tensor]:
        r"""Log-ratios `(P,)` $\log\pi(y \mid x) - \log\pi_\text{ref}(y \mid x)$ of chosen and rejected."""
        (chosen, rejected), (reference_chosen, reference_rejected) = self.logps(), self.reference()
        return chosen - reference_chosen, rejected - reference_rejected

    def per_token(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Values `(P,)` of chosen and rejected, each over its length."""
        if self.chosen_lengths is None or self.rejected_lengths is None:
            raise ValueError(
                "chosen_lengths or rejected_lengths is None: this loss averages over tokens; give the number of "
                "tokens of each completion, mask.sum(-1)"
            )
        _, chosen_lengths, rejected_lengths = same_shape(
            chosen_logps=self.chosen_logps, chosen_lengths=self.chosen_lengths, rejected_lengths=self.rejected_lengths
        )
        return chosen / chosen_lengths.clamp_min(1), rejected / rejected_lengths.clamp_min(1)

    def real(self) -> Tensor:
        """Which pairs `(P,)` are no filler: all of them where lengths are not given."""
        real = torch.ones_like(self.chosen_logps, dtype=torch.bool)
        for lengths in (self.chosen_lengths, self.rejected_lengths):
            real = real if lengths is None else real & (lengths > 0)
        return real


def length_desensitised_sum(logps: Tensor, mask: Tensor, shared: Tensor, alpha: float) -> Tensor:
    r"""Sum of log-probabilities in which the tokens past a shared length weigh `alpha` (LD-DPO).

    $$\sum_{t \le s} \log p_t + \alpha \sum_{t > s} \log p_t$$

    with s the length of the shorter completion of the pair. Alpha 1 is the plain sum. Policy and reference alike.

    Args:
        logps: `(..., T)`, in nats.
        mask: `(..., T)`, True at the tokens of the completion; t counts these.
        shared: s, `(...)` or broadcastable to it: `mask.sum(-1).amin(-1, keepdim=True)` for pairs `(P, 2, T)`.
        alpha: weight of the tail, in [0, 1].

    Returns:
        `(...)`, float32 or wider.

    Raises:
        ValueError: if `alpha` is outside [0, 1] or the shapes differ.

    Example:
        >>> import torch
        >>> logps = torch.full((1, 2, 4), -1.0)
        >>> mask = torch.tensor([[[True, True, True, True], [True, True, False, False]]])
        >>> length_desensitised_sum(logps, mask, mask.sum(-1).amin(-1, keepdim=True), alpha=0.5).tolist()
        [[-3.0, -2.0]]

    Source: Liu et al., "Length Desensitization in Direct Preference Optimization", arXiv 2409.06411.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; give a weight from 0 (the tail is ignored) to 1 (the plain sum)")
    (logps,) = same_shape(logps=logps)
    if mask.shape != logps.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; give that of logps, {tuple(logps.shape)}")
    mask = mask.bool()
    tail = mask.cumsum(-1) > shared.unsqueeze(-1)
    logps = torch.where(mask, logps, 0)
    return torch.where(tail, alpha * logps, logps).sum(-1)


def wpo_weights(logps: Tensor, collision: Tensor, mask: Tensor) -> Tensor:
    r"""Weights of preference pairs by how likely the policy is to write them itself (WPO), without gradient.

    $$w = \prod_{y} \exp\Big(\frac{1}{|y|}\sum_t \log p_t - \log\sum_v p_{t,v}^2\Big)$$

    over the completions y of a pair. Dividing by the sum of squares, the expected probability of a sampled token, gives
    what the policy samples a weight near 1 whether its distributions are flat or sharp. Multiply the loss of the pair.

    Args:
        logps: log-probabilities `(P, G, T)` under the policy.
        collision: collision entropies $-\log\sum_v p_v^2$ `(P, G, T)`, of `token_scores(..., collision=True)`.
        mask: `(P, G, T)`, True at the tokens of a completion.

    Returns:
        `(P,)`, float32 or wider, detached.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> logps, collision = torch.full((1, 2, 3), 0.25).log(), torch.full((1, 2, 3), 4.0).log()
        >>> wpo_weights(logps, collision, torch.ones(1, 2, 3, dtype=torch.bool)).tolist()
        [1.0]

    Source: Zhou et al., "WPO: Enhancing RLHF with Weighted Preference Optimization", arXiv 2406.11827,
        with sampled alignment.
    """
    aligned = torch.stack(same_shape(logps=logps.detach(), collision=collision.detach())).sum(0)
    return masked_mean(aligned, mask).sum(1).exp()

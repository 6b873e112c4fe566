"""Supervised fine-tuning as a method: what a batch's loss sum is, and how many tokens it averages over."""

from dataclasses import dataclass

import torch
from posttrain_app.methods import balancing_term
from posttrain_collators import TokenBatch
from posttrain_losses import Mean
from posttrain_models import weighted_logp_sum


@dataclass(frozen=True)
class SFT:
    r"""Next-token cross-entropy over the tokens that `batch.loss_mask` marks.

    With `M` the marked tokens of an optimiser step, over all its micro-batches and ranks:

    $$L = -\frac{1}{|M|} \sum_{t \in M} w_t \log p_\theta(x_t \mid x_{<t})$$

    where `w_t = 1` for plain negative log-likelihood and `w_t = sg(p_theta(x_t))` for dynamic fine-tuning (`dft=True`,
    https://arxiv.org/abs/2508.05629). Both are linear in the log-probabilities with weights known in the forward, so
    the gradients of the LM head are computed there and no logits are kept.

    Args:
        dft: weigh every token by its own detached probability.
        router_aux_loss_coef: coefficient of a mixture-of-experts model's load-balancing loss, which the model computes
            a micro-batch at a time (it couples rows, so it alone depends on how a step is split); 0 leaves it out.

    Example:
        >>> import torch
        >>> from posttrain_collators import Padding, TokenCollator
        >>> from posttrain_models import tiny_model
        >>> batch = TokenCollator(Padding(pad_id=0))([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> method = SFT()
        >>> int(method.count(batch)["loss"])
        3
        >>> sums, metrics = method.loss(tiny_model("llama", vocab_size=16), batch)
        >>> sums["loss"].requires_grad, sorted(metrics)
        (True, ['entropy', 'mean_token_accuracy'])
    """

    dft: bool = False
    router_aux_loss_coef: float = 0.0

    def count(self, batch: TokenBatch) -> dict[str, torch.Tensor | int]:
        """The number of target tokens (and one load-balancing term a micro-batch, where there is one)."""
        counts: dict[str, torch.Tensor | int] = {"loss": batch.loss_mask.sum()}
        if self.router_aux_loss_coef:
            counts["aux_loss"] = 1
        return counts

    def loss(self, model: torch.nn.Module, batch: TokenBatch) -> tuple[dict[str, torch.Tensor], dict[str, Mean]]:
        """The loss sum (nats) over the target tokens of `batch`, with entropy and accuracy of the same tokens."""
        result = weighted_logp_sum(
            model, batch, batch.loss_mask.float(), reweight=torch.exp if self.dft else None, entropy=True
        )
        sums = {"loss": -result.total}
        metrics = {
            "entropy": Mean.of(result.scores.entropy, batch.loss_mask),
            "mean_token_accuracy": Mean.of(result.scores.top1, batch.loss_mask),
        }
        balance, balance_metrics = balancing_term(self.router_aux_loss_coef, result.aux_loss)
        return {**sums, **balance}, {**metrics, **balance_metrics}

    def predict(self, model: torch.nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Full logits `(B, T, V)` and labels `(B, T)` (-100 where nothing is a target), for `compute_metrics` alone.

        Raises:
            ValueError: A row holds several sequences, which a plain call would mix.
        """
        if bool((batch.segment_ids > 1).any()):
            raise ValueError(
                "predictions need one sequence a row: set packing=False (eval_packing=False) for these rows."
            )
        logits = model(
            input_ids=batch.input_ids,
            attention_mask=(batch.segment_ids > 0).long(),
            position_ids=batch.position_ids,
            use_cache=False,
        ).logits
        return logits, torch.where(batch.loss_mask, batch.input_ids, -100)

"""What the formulas of several methods read of a batch, of a reference and of a mixture of experts."""

import torch
from posttrain_collators import CompletionBatch
from posttrain_losses import Mean
from posttrain_models.references import Reference
from torch import Tensor, nn


def scored(batch: CompletionBatch) -> Tensor:
    """Completion tokens `(P, G, Tc)` of rows that count: the first one has no log-probability without a prompt.

    Example:
        >>> from posttrain_collators import PreferenceCollator
        >>> from posttrain_app.methods import scored
        >>> scored(PreferenceCollator(0)([{"chosen_ids": [7, 8, 9], "rejected_ids": [7, 5]}])).int().tolist()
        [[[0, 1, 1], [0, 1, 0]]]
    """
    mask = batch.completion_mask.clone()
    mask[..., 0] &= batch.prompt_mask.any(-1)[:, None]
    return mask & real_of(mask)[:, None, None]


def real_of(mask: Tensor) -> Tensor:
    """Rows `(P,)` all of whose completions have a token under a mask `(P, G, Tc)`."""
    return mask.any(-1).all(-1)


def real(batch: CompletionBatch) -> Tensor:
    """Rows `(P,)` that count: every completion has a token that is scored."""
    return real_of(scored(batch))


def carried_or_computed(reference: Reference | None, model: nn.Module, batch: CompletionBatch) -> Tensor:
    """Log-probabilities `(P, G, Tc)` under the reference: those that the rows carry, or computed.

    Raises:
        ValueError: There are neither.
    """
    carried = getattr(batch.extras, "reference_logps", None)
    if carried is not None:
        return carried
    if reference is None:
        raise ValueError(
            "these rows carry no log-probabilities of the reference, and there is no reference to compute them "
            "(precompute_ref_log_probs=True keeps none): pass rows to the trainer's constructor, or leave it out."
        )
    return reference.logps(model, batch)


def balancing_coefficient(model: nn.Module, wanted: float | None) -> float:
    """The weight of a mixture of experts' load-balancing loss, and whether the model computes that loss.

    Args:
        model: The model; its configuration is set.
        wanted: The weight; None takes the model's own.

    Raises:
        ValueError: A weight is wanted, and the model is no mixture of experts.
    """
    config = model.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None)
    if own is None:
        if wanted:
            raise ValueError(f"router_aux_loss_coef is for mixtures of experts; {type(model).__name__} is none.")
        return 0.0
    coefficient = own if wanted is None else wanted
    config.output_router_logits = coefficient > 0
    return coefficient


def balancing_term(
    coefficient: float, aux_loss: torch.Tensor | None
) -> tuple[dict[str, torch.Tensor], dict[str, Mean]]:
    """The load-balancing loss of a micro-batch, as sums and metrics of a method; nothing at a coefficient of 0.

    Args:
        coefficient: Its weight.
        aux_loss: What the model computed.

    Raises:
        ValueError: The model computes none.
    """
    if not coefficient:
        return {}, {}
    if aux_loss is None:
        raise ValueError("this model computes no load-balancing loss: set router_aux_loss_coef=0.")
    return {"aux_loss": coefficient * aux_loss}, {"aux_loss": Mean.of(aux_loss)}

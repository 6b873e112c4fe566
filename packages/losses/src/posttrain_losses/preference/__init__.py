"""Losses of human preferences: pairs (DPO and its variants), labelled completions (KTO) and rewards (Bradley-Terry).

One value per pair or completion, never reduced, float32 or wider whatever the inputs are.
"""

from posttrain_losses.preference.contrasts import (
    aot,
    aot_unpaired,
    discopop,
    exo_pair,
    hinge,
    ipo,
    robust,
    sigmoid,
    sigmoid_norm,
    simpo,
)
from posttrain_losses.preference.divergences import alpha_divergence, forward_kl, js_divergence, reverse_kl
from posttrain_losses.preference.feedback import apo_zero_unpaired, kto_loss
from posttrain_losses.preference.pairs import Pairs, length_desensitised_sum, wpo_weights
from posttrain_losses.preference.rewards import bradley_terry_loss, reward_centering
from posttrain_losses.preference.singles import apo_down, apo_zero, bco_pair, nca_pair, sft, sppo_hard

__all__ = [
    "Pairs",
    "alpha_divergence",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco_pair",
    "bradley_terry_loss",
    "discopop",
    "exo_pair",
    "forward_kl",
    "hinge",
    "ipo",
    "js_divergence",
    "kto_loss",
    "length_desensitised_sum",
    "nca_pair",
    "reverse_kl",
    "reward_centering",
    "robust",
    "sft",
    "sigmoid",
    "sigmoid_norm",
    "simpo",
    "sppo_hard",
    "wpo_weights",
]

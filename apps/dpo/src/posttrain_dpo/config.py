"""Options of direct preference optimisation."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from posttrain_app.preference import PreferenceConfig
from posttrain_losses import preference

DIVERGENCES = {
    "reverse_kl": preference.reverse_kl,
    "forward_kl": preference.forward_kl,
    "js_divergence": preference.js_divergence,
    "alpha_divergence": preference.alpha_divergence,
}
# What each loss reads besides beta.
LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sigmoid": (preference.sigmoid, ("label_smoothing", "divergence")),
    "sigmoid_norm": (preference.sigmoid_norm, ("label_smoothing", "divergence")),
    "hinge": (preference.hinge, ("divergence",)),
    "ipo": (preference.ipo, ("divergence",)),
    "exo_pair": (preference.exo_pair, ("label_smoothing", "divergence")),
    "robust": (preference.robust, ("label_smoothing", "divergence")),
    "discopop": (preference.discopop, ("tau", "divergence")),
    "nca_pair": (preference.nca_pair, ()),
    "bco_pair": (preference.bco_pair, ()),
    "sppo_hard": (preference.sppo_hard, ()),
    "aot": (preference.aot, ("label_smoothing",)),
    "aot_unpaired": (preference.aot_unpaired, ("label_smoothing",)),
    "apo_zero": (preference.apo_zero, ()),
    "apo_down": (preference.apo_down, ()),
    "simpo": (preference.simpo, ("gamma",)),
    "sft": (preference.sft, ("divergence",)),
}


@dataclass
class DPOConfig(PreferenceConfig):
    """Options of `DPOTrainer`: those of preference optimisation, and every option of `transformers.TrainingArguments`.

    Example:
        >>> config = DPOConfig("runs/dpo", loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2])
        >>> config.learning_rate, config.beta, config.loss_type
        (1e-06, 0.1, ['sigmoid', 'sft'])

    Raises:
        ValueError: an option has a value that cannot be meant; the message names the option and what to write.
    """

    loss_type: list[str] = field(
        default_factory=lambda: ["sigmoid"],
        metadata={"help": f"One loss or several, which are added: {', '.join(LOSSES)}."},
    )
    loss_weights: list[float] | None = field(
        default=None, metadata={"help": "A weight for each loss; none weighs all of them 1."}
    )
    label_smoothing: float = field(
        default=0.0, metadata={"help": "Rate of pairs whose label is wrong; for sigmoid, exo_pair, robust and aot."}
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = field(
        default="reverse_kl",
        metadata={"help": f"What keeps the policy at the reference: {', '.join(DIVERGENCES)}."},
    )
    f_alpha_divergence_coef: float = field(default=0.5, metadata={"help": "Order of the alpha divergence."})
    discopop_tau: float = field(default=0.05, metadata={"help": "Temperature of the blend in discopop."})
    simpo_gamma: float = field(default=0.5, metadata={"help": "Margin between the rewards of a pair in simpo."})
    ld_alpha: float | None = field(
        default=None,
        metadata={"help": "Weight of tokens past the length of the shorter completion (LD-DPO); none weighs all 1."},
    )
    use_weighting: bool = field(
        default=False, metadata={"help": "Weigh pairs by how likely the policy is to write them itself (WPO)."}
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is loaded."""
        if isinstance(self.loss_type, str):  # one loss need not stand in a list
            self.loss_type = [self.loss_type]
        super().__post_init__()
        if not self.loss_type:
            raise ValueError("loss_type is empty: name at least one loss.")
        for name in self.loss_type:
            if name not in LOSSES:
                raise ValueError(f"loss_type={name!r}: write one of {', '.join(LOSSES)}, or several.")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} entries for {len(self.loss_type)} losses in loss_type: "
                "write one for each."
            )
        if self.f_divergence_type != "reverse_kl":
            plain = [name for name in self.loss_type if "divergence" not in LOSSES[name][1]]
            if plain:
                raise ValueError(
                    f"f_divergence_type={self.f_divergence_type!r} has no meaning for loss_type {plain[0]!r}: write "
                    "'reverse_kl', or another loss."
                )
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing}: write a rate from 0 to below 0.5.")
        if "exo_pair" in self.loss_type and not self.label_smoothing:
            raise ValueError("label_smoothing=0: exo_pair needs one above 0, such as 0.001.")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ValueError(f"ld_alpha={self.ld_alpha}: write a weight from 0 to 1, or none.")
        if self.use_weighting and {"aot", "aot_unpaired"} & set(self.loss_type):
            raise ValueError("use_weighting=True weighs pairs, and aot takes them apart: leave one of the two out.")
        if self.beta <= 0:
            raise ValueError(f"beta={self.beta}: write a number above 0.")
        if self.discopop_tau <= 0:
            raise ValueError(f"discopop_tau={self.discopop_tau}: write a number above 0.")

    def losses(self) -> tuple[tuple[Any, float], ...]:
        """The functions that `loss_type` names, with their options set, each with its weight."""
        divergence = DIVERGENCES[self.f_divergence_type]
        if divergence is preference.alpha_divergence:
            divergence = partial(divergence, alpha=self.f_alpha_divergence_coef)
        options = {
            "label_smoothing": self.label_smoothing,
            "divergence": divergence,
            "tau": self.discopop_tau,
            "gamma": self.simpo_gamma,
        }
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        found = []
        for name, weight in zip(self.loss_type, weights, strict=True):
            function, reads = LOSSES[name]
            own = {key: options[key] for key in reads} if name != "sft" else {}
            found.append((partial(function, **own) if own else function, weight))
        return tuple(found)

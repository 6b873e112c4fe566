"""Callbacks that any method can use."""

import logging
from pathlib import Path
from typing import Any

import torch
from posttrain_models import unwrap
from transformers import TrainerCallback

logger = logging.getLogger("posttrain")


class BEMACallback(TrainerCallback):
    """Bias-corrected exponential moving average of the weights, kept beside training and saved at its end.

    With theta_t the weights at step t and theta_0 those at step `update_after`, every `update_freq` steps

        EMA  <- (1 - beta_t) * EMA + beta_t * theta_t,       beta_t  = max((lag + multiplier * t) ** -ema_power, min)
        BEMA <- EMA + alpha_t * (theta_t - theta_0),          alpha_t = (lag + multiplier * t) ** -bias_power

    At the end of training the averaged model is saved to `<output_dir>/bema`. The averages are part of every
    checkpoint, so a resumed run ends with the same ones. Sharded models (FSDP, ZeRO-3) are refused.

    Source: Block and Zhang, "EMA Without the Lag: Bias-Corrected Iterate Averaging Schemes", 2025,
    https://huggingface.co/papers/2508.00180.

    Args:
        update_freq: Steps between updates.
        ema_power: Decay of beta; 0 follows the weights without averaging.
        bias_power: Decay of alpha; large values switch the correction off.
        lag: Age that the schedule starts at.
        update_after: Steps before the average begins.
        multiplier: How fast the schedule ages.
        min_ema_multiplier: The least beta.
        device: Where the averages are kept.

    Example:
        >>> from posttrain_trainer import BEMACallback
        >>> BEMACallback(update_freq=100).beta(10)
        0.22360679774997896
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
    ) -> None:
        if update_freq < 1:
            raise ValueError(f"update_freq={update_freq}: write a number of steps of at least 1")
        self.update_freq, self.update_after = update_freq, update_after
        self.ema_power, self.bias_power = ema_power, bias_power
        self.lag, self.multiplier, self.min_ema_multiplier = lag, multiplier, min_ema_multiplier
        self.device = device
        self.start: dict[str, torch.Tensor] = {}
        self.ema: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def beta(self, step: int) -> float:
        """The weight of the current parameters in the average."""
        return max((self.lag + self.multiplier * step) ** -self.ema_power, self.min_ema_multiplier)

    def alpha(self, step: int) -> float:
        """The weight of the bias correction."""
        return (self.lag + self.multiplier * step) ** -self.bias_power

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Starts from the weights as they are."""
        model = unwrap(model)
        if any(type(parameter) not in (torch.Tensor, torch.nn.Parameter) or hasattr(parameter, "ds_id")
               for parameter in model.parameters()):  # fmt: skip
            raise ValueError("BEMACallback needs whole parameters on every rank: use DDP, ZeRO-1 or ZeRO-2")
        self._begin(model)

    @torch.no_grad()
    def _begin(self, model: torch.nn.Module) -> None:
        self.start = {
            name: parameter.detach().to(self.device, copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.ema = {name: value.clone() for name, value in self.start.items()}
        self.weights = {name: value.clone() for name, value in self.start.items()}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Updates the averages when it is time."""
        step = state.global_step
        if step < self.update_after:
            return
        model = unwrap(model)
        if step == self.update_after:
            self._begin(model)
        elif (step - self.update_after) % self.update_freq == 0:
            beta, alpha = self.beta(step), self.alpha(step)
            for name, parameter in model.named_parameters():
                if name in self.ema:
                    now = parameter.detach().to(self.device)
                    ema = self.ema[name].mul_(1 - beta).add_(now, alpha=beta)
                    self.weights[name].copy_(ema + alpha * (now - self.start[name]))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Saves the averaged model."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / "bema"
        model = unwrap(model)
        averaged = {**model.state_dict(), **self.weights}
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(str(folder), state_dict=averaged)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(averaged, folder / "pytorch_model.bin")
        logger.info("saved the averaged model to %s", folder)

    def state_dict(self) -> dict[str, Any]:
        """The averages, for the checkpoint."""
        return {"start": self.start, "ema": self.ema, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved averages."""
        self.start, self.ema, self.weights = (
            {name: value.to(self.device) for name, value in state[key].items()} for key in ("start", "ema", "weights")
        )

"""Reference models: what the policy was before training, frozen, and scored as the policy is."""

from __future__ import annotations

import copy
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from posttrain_collators import CompletionBatch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain_models.completions import completion_logps
from posttrain_models.layout import choose_layout
from posttrain_models.precompute import precompute_reference
from posttrain_models.unwrap import base_model, input_device, state_of, unwrap

__all__ = ["AdapterOff", "FrozenModel", "NamedAdapter", "Reference", "make_reference", "precompute_reference"]

logger = logging.getLogger("posttrain")

NAME = "reference"
# Configuration entries that do not change what the weights compute.
_UNRELATED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


class Reference(ABC):
    """A model that stays what it was, to compare the policy with.

    `make_reference` chooses among `FrozenModel`, `AdapterOff` and `NamedAdapter`.

    Example:
        >>> from posttrain_collators import PreferenceCollator
        >>> from posttrain_models import tiny_model
        >>> from posttrain_models import completion_logps
        >>> batch = PreferenceCollator(0)([{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}])
        >>> policy = tiny_model("llama")
        >>> reference = make_reference(policy)
        >>> bool((reference.logps(policy, batch) == completion_logps(policy, batch)).all())
        True
    """

    def logps(self, model: nn.Module, batch: CompletionBatch) -> Tensor:
        """Log-probabilities of the completion tokens under the reference, in nats; without gradient or dropout.

        They are computed in the policy's layout. A batch that brings them along (`batch.extras.reference_logps`, see
        `precompute_reference`) is not computed again.

        Args:
            model: The policy, wrapped or not; every module's mode is put back afterwards.
            batch: P prompts with G completions each.

        Returns:
            `(P, G, Tc)` float32, 0 where `batch.completion_mask` is False.
        """
        given = getattr(batch.extras, "reference_logps", None)
        if given is not None:
            return given.to(batch.completions.device)
        return self.compute(model, batch)

    @torch.no_grad()
    def compute(self, model: nn.Module, batch: CompletionBatch) -> Tensor:
        """As `logps`, whatever the batch brings along."""
        with self._in_place(model) as reference, _evaluating(reference):
            return completion_logps(reference, batch)

    @abstractmethod
    def _in_place(self, model: nn.Module) -> Any:
        """A context in which the module that it yields is the reference."""

    @abstractmethod
    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights that the reference computes with, by name."""

    def settings(self, model: nn.Module) -> str:
        """What else decides what the reference computes, as text."""
        config = {k: v for k, v in base_model(model).config.to_dict().items() if k not in _UNRELATED}
        return json.dumps(config, sort_keys=True, default=str)


class FrozenModel(Reference):
    """A model of its own as the reference.

    It is frozen in place, follows the policy to its device and layout, and is sharded as the policy is under FSDP2.

    Args:
        model: The model; not the policy itself.

    Example:
        >>> from posttrain_models import tiny_model
        >>> policy, other = tiny_model("llama"), tiny_model("llama", seed=1)
        >>> reference = FrozenModel(other)
        >>> reference.sync(policy, 1.0)
        >>> all((a == b).all() for a, b in zip(policy.parameters(), other.parameters()))
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self._followed: Any = None

    @contextmanager
    def _in_place(self, model: nn.Module) -> Iterator[nn.Module]:
        self._follow(model)
        yield self.model

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights that the reference computes with, by name."""
        yield from self.model.state_dict().items()

    def settings(self, model: nn.Module) -> str:
        """What else decides what the reference computes, as text."""
        adapters = getattr(unwrap(self.model), "peft_config", {})
        return super().settings(self.model) + json.dumps({n: c.to_dict() for n, c in adapters.items()}, default=str)

    @torch.no_grad()
    def sync(self, model: nn.Module, alpha: float) -> None:
        """Move the reference towards the policy: `reference = alpha * policy + (1 - alpha) * reference`.

        In place, one weight at a time, in float32 (TR-DPO, Gorbatovski et al., arXiv 2404.09656).

        Args:
            model: The policy, wrapped or not.
            alpha: Between 0 and 1; 1 copies the policy.

        Raises:
            ValueError: `alpha` is out of range, the policy has an adapter, or the weights do not correspond.
        """
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha={alpha} is not between 0 and 1")
        if hasattr(unwrap(model), "peft_config"):
            raise ValueError("the policy has an adapter, so a reference cannot follow it weight by weight")
        self._follow(model)
        _shards(base_model(model))
        _shards(base_model(self.model))
        policy = dict(base_model(model).named_parameters())
        mine = dict(base_model(self.model).named_parameters())
        if policy.keys() != mine.keys() or any(mine[name].shape != weight.shape for name, weight in policy.items()):
            raise ValueError("the reference and the policy are different architectures, so they cannot be mixed")
        for name, weight in mine.items():
            own, other = _alike(weight, policy[name])
            own.copy_(other if alpha == 1 else own.float().lerp(other.float(), alpha))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights, for a run whose reference moves and that is to be resumed."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state)

    def _follow(self, model: nn.Module) -> None:
        policy, mine = base_model(model), base_model(self.model)
        _shard_alike(policy, mine)
        if input_device(mine) != input_device(policy) and not isinstance(next(mine.parameters()), DTensor):
            self.model.to(input_device(policy))
        layout = state_of(policy).layout
        if layout is None or layout is self._followed:
            return
        self._followed = layout
        own = state_of(mine).layout
        if own is not None and (own.name, own.static_shapes) == (layout.name, layout.static_shapes):
            return
        try:
            choose_layout(self.model, layout.name, static_shapes=layout.static_shapes)
        except ValueError as error:
            own = choose_layout(self.model, static_shapes=layout.static_shapes)
            logger.warning("the reference model runs %s: %s", own.name, error)


class AdapterOff(Reference):
    """The policy with its adapter switched off, as the reference: no second model.

    Example:
        >>> from posttrain_models import LoraOptions, apply_lora, tiny_model
        >>> policy = apply_lora(tiny_model("llama"), LoraOptions(use_peft=True))
        >>> make_reference(policy)
        AdapterOff()
    """

    def __repr__(self) -> str:
        return "AdapterOff()"

    @contextmanager
    def _in_place(self, model: nn.Module) -> Iterator[nn.Module]:
        with _adapter(model, None):
            yield model

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights that the reference computes with, by name."""
        yield from _weights_of(model, None)


class NamedAdapter(Reference):
    """The policy with another adapter in the place of its own, as the reference.

    Args:
        name: The adapter.

    Example:
        >>> from posttrain_models import LoraOptions, apply_lora, tiny_model
        >>> policy = apply_lora(tiny_model("llama"), LoraOptions(use_peft=True))
        >>> for name, weight in policy.named_parameters():
        ...     if "lora_B" in name:
        ...         _ = weight.data.fill_(0.1)  # an adapter that was trained before
        >>> make_reference(policy)
        NamedAdapter('reference')
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"NamedAdapter({self.name!r})"

    @contextmanager
    def _in_place(self, model: nn.Module) -> Iterator[nn.Module]:
        with _adapter(model, self.name):
            yield model

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights that the reference computes with, by name."""
        yield from _weights_of(model, self.name)

    def settings(self, model: nn.Module) -> str:
        """What else decides what the reference computes, as text."""
        config: Any = unwrap(model).peft_config
        return super().settings(model) + json.dumps(config[self.name].to_dict(), sort_keys=True, default=str)


def make_reference(model: nn.Module, ref_model: nn.Module | None = None) -> Reference:
    """The reference of a policy that has not been trained yet.

    Args:
        model: The policy. Without `ref_model`, the reference is what it is now: of a model, a frozen copy; of a model
            with a new adapter, the model with the adapter switched off; of a model whose adapter was trained before, a
            frozen copy of the adapter, named "reference".
        ref_model: Another model as the reference; it is frozen in place.

    Returns:
        The reference; call `logps` on it.

    Raises:
        ValueError: `ref_model` is the policy or shares trainable weights with it, or the weights are partitioned.

    Example:
        >>> from posttrain_models import tiny_model
        >>> policy = tiny_model("llama")
        >>> type(make_reference(policy, tiny_model("llama", seed=1))).__name__
        'FrozenModel'
    """
    if ref_model is not None:
        _check_apart(model, ref_model)
        return FrozenModel(ref_model)
    inner: Any = unwrap(model)
    if not hasattr(inner, "peft_config"):
        return _frozen_copy(inner)
    if NAME in inner.peft_config:
        _freeze_adapter(inner, NAME)
        return NamedAdapter(NAME)
    if _trains_beside_adapter(inner) or len(inner.active_adapters) != 1:
        logger.info("the reference is a copy of the whole model: more than one adapter trains")
        return _frozen_copy(inner)
    if _changes_nothing(inner):
        return AdapterOff()
    try:
        _copy_adapter(inner)
    except (ValueError, NotImplementedError) as error:  # kinds of adapters of which a model can have only one
        logger.info("the reference is a copy of the whole model: %s", error)
        return _frozen_copy(inner)
    return NamedAdapter(NAME)


def _check_apart(model: nn.Module, ref_model: nn.Module) -> None:
    if base_model(ref_model) is base_model(model):
        raise ValueError(
            "ref_model is the model that is trained: leave it out, and the reference is what the model is now"
        )
    trained = {id(p) for p in unwrap(model).parameters() if p.requires_grad}
    if any(id(p) in trained for p in ref_model.parameters()):
        raise ValueError("ref_model shares weights with the model that is trained: load it a second time")


def _frozen_copy(model: nn.Module) -> FrozenModel:
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise ValueError(
            "the weights are partitioned by DeepSpeed ZeRO-3, so the model cannot be copied for a reference: pass "
            "ref_model, or train an adapter"
        )
    return FrozenModel(copy.deepcopy(model))


def _parts(name: str) -> set[str]:
    return set(name.split("."))


def _trains_beside_adapter(model: Any) -> bool:
    """Whether weights that no adapter owns are trained (biases, say), so that none can be switched off."""
    adapters = set(model.peft_config)
    return any(p.requires_grad and not _parts(n) & adapters for n, p in model.named_parameters())


def _changes_nothing(model: Any) -> bool:
    """Whether the active adapter is as it was made: its model computes the same without it."""
    weights = dict(model.named_parameters())
    active = model.active_adapters[0]
    for name, weight in weights.items():
        parts = _parts(name)
        if active not in parts or parts & {"lora_A", "lora_embedding_A", "lora_magnitude_vector"}:
            continue
        if parts & {"lora_B", "lora_embedding_B"}:
            if bool((weight != 0).any()):
                return False
            continue
        original = weights.get(name.replace(f"modules_to_save.{active}", "original_module"))
        if original is None or original is weight or not torch.equal(original, weight):
            return False
    return True


def _copy_adapter(model: Any) -> None:
    active = model.active_adapters[0]
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others would change the model's own weights again
    with torch.random.fork_rng(devices=[]):
        model.add_adapter(NAME, config)
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if active in _parts(name):
            own = ".".join(NAME if part == active else part for part in name.split("."))
            weights[own].data = weight.detach().clone()
    _freeze_adapter(model, NAME)


def _freeze_adapter(model: nn.Module, name: str) -> None:
    for full, weight in model.named_parameters():
        if name in _parts(full):
            weight.requires_grad_(False)


def _weights_of(model: nn.Module, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with one of its adapters, or with none."""
    inner: Any = unwrap(model)
    others = set(inner.peft_config) - {adapter}
    for name, weight in inner.named_parameters():
        if not _parts(name) & others:
            yield name, weight


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout inside; the modes of all modules are put back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """Another adapter, or none, inside.

    The flags are set directly: peft's own switches also decide anew which weights require a gradient, which FSDP2
    reads once and which would thaw what was frozen on purpose.
    """
    layers: list[Any] = [m for m in unwrap(model).modules() if hasattr(m, "_disable_adapters")]
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    for layer in layers:
        if name is None:
            layer._disable_adapters = True
        else:
            layer._disable_adapters, layer._active_adapter = False, [name]
    try:
        yield
    finally:
        for layer, (disabled, active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = disabled, active


def _alike(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """This process's part of two weights, the same part of both."""
    if isinstance(own, DTensor) and isinstance(other, DTensor):
        return own.to_local(), other.to_local()
    return own, other.full_tensor() if isinstance(other, DTensor) else other.to(own.device)


def _shards(model: nn.Module) -> dict[str, Any]:
    """The modules that FSDP2 shards, put back to their shards: after a forward, the outermost keeps whole weights."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    for module in found.values():
        module.reshard()
    return found


def _shard_alike(policy: nn.Module, mine: nn.Module) -> None:
    """Shards a whole model with FSDP2 at the modules, and over the mesh, of a policy that is sharded."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(policy, FSDPModule) or isinstance(mine, FSDPModule):
        return
    modules = _shards(policy)
    shard = next(p for p in policy.parameters() if isinstance(p, DTensor))
    mine.to(shard.to_local().device)
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() in ("1", "true"):
        for weight in mine.state_dict().values():  # other ranks have room for the weights, and nothing in it
            dist.broadcast(weight, 0)
    own = dict(mine.named_modules())
    for name, module in reversed(modules.items()):
        fully_shard(own[name], mesh=shard.device_mesh, mp_policy=module._get_fsdp_state()._mp_policy)

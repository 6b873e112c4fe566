"""Small random models of real architectures, for demonstrations and tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from posttrain_models.unwrap import keep_softcap

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# Model type of transformers and the settings that differ from the common ones.
_TINY: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {}),
        "smollm2": ("llama", {"tie_word_embeddings": True}),
        "qwen2": ("qwen2", {}),
        "qwen3": ("qwen3", {"tie_word_embeddings": True}),
        "mistral": ("mistral", {"sliding_window": 8}),
        "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 8}),
        "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 8}),
        "cohere": ("cohere", {"logit_scale": 0.25}),
        "granite": ("granite", {"logits_scaling": 4.0}),
        "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
        "mixtral": ("mixtral", _MOE),
        "qwen3_moe": ("qwen3_moe", _MOE),
        "gpt_oss": ("gpt_oss", {**_MOE, **_SLIDING}),
        "qwen3_5": ("qwen3_5_text", _DELTA),
    }
)


def tiny_model(
    architecture: str = "llama", vocab_size: int = 128, *, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of a real architecture with two small layers, float32, on the CPU.

    Args:
        architecture: llama, smollm2 (tied embeddings), qwen2, qwen3, mistral, gemma2 (soft-caps, sliding windows),
            gemma3, cohere and granite (scaled logits), gpt2, mixtral, qwen3_moe, gpt_oss (attention sinks) or
            qwen3_5 (gated delta net layers).
        vocab_size: Number of tokens.
        seed: Of the weights; the global random state is left as it was.
        **overrides: Fields of the architecture's configuration.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: For an architecture that is not in the list.

    Example:
        >>> from posttrain_models import tiny_model
        >>> tiny_model("qwen3", vocab_size=50).get_output_embeddings().weight.shape
        torch.Size([50, 32])
    """
    return _build(AutoModelForCausalLM, _TINY, architecture, vocab_size, seed, overrides)


def tiny_reward_model(
    architecture: str = "llama", vocab_size: int = 128, *, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random reward model: as `tiny_model`, a sequence classifier with one label; token 0 pads.

    Args:
        architecture: As for `tiny_model`, but for cohere and granite, which have no classifier.
        vocab_size: Number of tokens.
        seed: Of the weights; the global random state is left as it was.
        **overrides: Fields of the architecture's configuration.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: For an architecture that is not in the list.

    Example:
        >>> from posttrain_models.tiny import tiny_reward_model
        >>> tiny_reward_model("qwen3").score.weight.shape
        torch.Size([1, 32])
    """
    known = {key: value for key, value in _TINY.items() if key not in ("cohere", "granite")}
    overrides = {"num_labels": 1, "pad_token_id": 0, **overrides}
    return _build(AutoModelForSequenceClassification, known, architecture, vocab_size, seed, overrides)


def _build(
    loader: Any,
    known: Mapping[str, tuple[str, dict[str, Any]]],
    architecture: str,
    vocab_size: int,
    seed: int,
    overrides: dict[str, Any],
) -> PreTrainedModel:
    if architecture not in known:
        raise ValueError(f"architecture={architecture!r} is not one of {', '.join(known)}")
    model_type, settings = known[architecture]
    fields = {**_COMMON, "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if model_type == "gpt2":
        fields = {key: fields[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(model_type, **{**fields, **settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = loader.from_config(config, dtype=torch.float32)
    keep_softcap(model)
    return model.eval()

"""Activations: recomputed selectively, or kept in host memory. Freed memory: kept for the next step."""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Attention is quadratic in the length to recompute and linear to keep.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
OFFLOAD_BYTES = 1024

# glibc's options of mallopt, their values while training (never mmap, never trim, grow by 64 MB), and its defaults.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 64 << 20}
GIVE_BACK = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20, M_TOP_PAD: 128 << 10}


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Keeps what a step on the CPU frees for the next step, and gives it back at the end.

    glibc hands every large block back to the system as soon as it is free and takes a new one, which the kernel fills
    with zeros page by page: a tenth of a training step. Other C libraries, and settings of the environment, are left
    alone.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    libc = ctypes.CDLL(None) if device.type == "cpu" and sys.platform == "linux" and not chosen else None
    if not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    for option, value in KEEP.items():
        libc.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in GIVE_BACK.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


@functools.cache
def attention_operators() -> frozenset[Any]:
    """The attention kernels of this PyTorch."""
    found = {getattr(getattr(torch.ops.aten, name, None), "default", None) for name in ATTENTION}
    varlen = getattr(getattr(torch.ops, "torch_attn", None), "_varlen_attn", None)
    return frozenset({*found, getattr(varlen, "default", None)} - {None})


def keep_attention(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of selective checkpointing: attention outputs are kept, the rest is recomputed."""
    kept = operator in attention_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """The contexts that `torch.utils.checkpoint` runs forward and recomputation in."""
    return create_selective_checkpoint_contexts(keep_attention)


def use_selective_checkpointing(model: torch.nn.Module, options: dict[str, Any]) -> None:
    """Replaces the checkpoint function of every layer with one that keeps attention outputs.

    Args:
        model: A transformers model on which gradient checkpointing is enabled.
        options: What was asked for besides `selective`; passed to `torch.utils.checkpoint.checkpoint`.

    Raises:
        ValueError: If `use_reentrant` is True, which has no selective form.
    """
    if options.get("use_reentrant"):
        raise ValueError(
            "gradient_checkpointing_kwargs: 'selective' needs non-reentrant checkpointing; leave out use_reentrant"
        )
    rest = {
        name: value for name, value in options.items() if name not in ("use_reentrant", "every_n_layers", "offload")
    }
    function = functools.partial(checkpoint, use_reentrant=False, context_fn=selective_contexts, **rest)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function


@contextmanager
def offloaded_activations(model: torch.nn.Module) -> Iterator[None]:
    """Keeps tensors that are saved for backward in pinned host memory while the block runs the forward.

    Parameters and their views stay where they are, and so do tensors under 1 KiB and those on the CPU.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if _plain(parameter)}

    def pack(tensor: torch.Tensor) -> Any:
        here = tensor.device.type == "cpu" or tensor.numel() * tensor.element_size() < OFFLOAD_BYTES
        if here or not _plain(tensor) or tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it owns ordinary memory (DTensors and other subclasses do not)."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided

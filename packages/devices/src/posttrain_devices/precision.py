"""Whether a device computes in bfloat16 itself."""

from __future__ import annotations

import platform

from posttrain_devices.spec import DeviceSpec


def supports_bf16(spec: DeviceSpec) -> bool:
    """Return whether the device of this machine multiplies bfloat16 matrices itself, rather than emulating it slowly.

    CPU: AVX512-BF16 or AMX on x86, the BF16 extension on ARM. CUDA: compute capability 8.0 (Ampere) or later; ROCm:
    always, as PyTorch has it. Trainium: always. MPS: macOS 14 or later; M1 and M2 emulate it there, which PyTorch does
    not tell. Others: what their own module says, False where it has no say. Only the
    CPU's answer was verified on hardware.

    Example:
        >>> from posttrain_devices import device_spec
        >>> supports_bf16(device_spec("neuron"))
        True
    """
    import torch

    if spec.name == "neuron":
        return True
    if spec.name == "cpu":
        if platform.machine().lower() in ("x86_64", "amd64"):
            return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if spec.name == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    module = torch.get_device_module(spec.name)
    if not module.is_available():
        return False
    if spec.name in ("cuda", "xpu"):  # by default these two say True for an emulation as well
        return module.is_bf16_supported(including_emulation=False)
    return hasattr(module, "is_bf16_supported") and module.is_bf16_supported()

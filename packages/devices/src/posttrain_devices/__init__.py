"""What differs between CPU, CUDA, AWS Trainium and other accelerators, stated once."""

from posttrain_devices.diagnosis import Fact, diagnose
from posttrain_devices.precision import supports_bf16
from posttrain_devices.rng import rng_state, set_rng_state
from posttrain_devices.spec import DeviceSpec, device_spec, resolve_pad_multiple
from posttrain_devices.visible import check_visible, local_devices

__all__ = [
    "DeviceSpec",
    "Fact",
    "check_visible",
    "device_spec",
    "diagnose",
    "local_devices",
    "resolve_pad_multiple",
    "rng_state",
    "set_rng_state",
    "supports_bf16",
]

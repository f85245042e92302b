"""Measured starting points of the engine's sizes, by the kind of device."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ValidationError


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Measured starting points of one kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    smallest_bucket: int  # XLA:CPU's fast matmul wants at least two rows
    compile_ahead: int  # programs; a CPU compiles on the cores that serve, so it begins with few
    compile_in_background: bool  # a GPU drops its graphs whenever something is compiled
    flops_per_number: float  # that the device computes while it moves a float32 number


ALL = 1000  # programs, more than there are
DEFAULTS = {
    "cpu": DeviceDefaults(32, 512, 16, 2, 2, True, 100.0),
    "gpu": DeviceDefaults(256, 2048, 16, 1, ALL, False, 800.0),
    "tpu": DeviceDefaults(128, 1024, 128, 1, 16, True, 900.0),
}


def device_defaults(platform: str) -> DeviceDefaults:
    """Defaults of a jax platform name.

    Raises:
        ValidationError: an unknown platform.
    """
    kind = "gpu" if platform in ("gpu", "cuda", "rocm") else platform
    if kind not in DEFAULTS:
        raise ValidationError("platform", platform, f"one of {', '.join(DEFAULTS)}")
    return DEFAULTS[kind]

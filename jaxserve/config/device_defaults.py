"""Measured starting points of the engine's sizes, by the kind of device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxserve.errors import ValidationError


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Measured starting points of one kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    # XLA:CPU's fast matmul wants at least two rows; a TPU's tile has eight, and takes more kernels
    # for a single one
    smallest_bucket: int
    compile_ahead: int  # programs; a CPU compiles on the cores that serve, so it begins with few
    compile_in_background: bool  # a GPU drops its graphs whenever something is compiled
    flops_per_number: float  # that the device computes while it moves a float32 number


ALL = 1000  # programs, more than there are
DEFAULTS = {
    "cpu": DeviceDefaults(32, 512, 16, 2, 2, True, 100.0),
    "gpu": DeviceDefaults(256, 2048, 16, 1, ALL, False, 800.0),
    "tpu": DeviceDefaults(128, 1024, 128, 8, 16, True, 900.0),
}
# page sizes of GPUs by compute capability, the others have the one above. Hopper's kernels pay for
# each copy of a page; Triton's read tokens one by one (docs/kernels.md, "The size of a page")
GPU_PAGE_SIZES = {"9.0": 64}


def device_defaults(platform: str, capability: str | None = None) -> DeviceDefaults:
    """Defaults of a device.

    Args:
        platform: its jax platform name.
        capability: `jax.Device.compute_capability` of a GPU, such as "9.0"; None: not known.

    Raises:
        ValidationError: an unknown platform.
    """
    kind = "gpu" if platform in ("gpu", "cuda", "rocm") else platform
    if kind not in DEFAULTS:
        raise ValidationError("platform", platform, f"one of {', '.join(DEFAULTS)}")
    defaults = DEFAULTS[kind]
    if kind != "gpu" or capability not in GPU_PAGE_SIZES:
        return defaults
    return replace(defaults, page_size=GPU_PAGE_SIZES[capability])

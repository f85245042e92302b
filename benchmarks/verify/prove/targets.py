"""The kinds of absent devices that functions are compiled for."""

from __future__ import annotations

from jax.sharding import Mesh

from benchmarks.verify.prove.gpu_targets import GPU_TARGETS, GpuTarget, gpu_mesh
from benchmarks.verify.prove.tpu_targets import TPU_TARGETS, TpuTarget, tpu_mesh
from pallas_kernels.errors import KernelError

TARGETS: dict[str, GpuTarget | TpuTarget] = {**GPU_TARGETS, **TPU_TARGETS}
KINDS = tuple(TARGETS)


def absent_mesh(kind: str, devices: int = 1) -> Mesh:
    """A mesh with the one axis "model" over devices that are not there.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
        KernelError: the kind is unknown.
    """
    if kind in GPU_TARGETS:
        return gpu_mesh(kind, devices)
    if kind in TPU_TARGETS:
        return tpu_mesh(kind, devices)
    raise KernelError("kind", repr(kind), f"one of {', '.join(KINDS)}")


def platform_of(kind: str) -> str:
    """JAX's name of the platform: "gpu" or "tpu"."""
    return "gpu" if kind in GPU_TARGETS else "tpu"


def device_name(kind: str) -> str:
    """`device_kind` as the device itself reports it."""
    return TARGETS[kind].name


def device_memory(kind: str) -> int:
    """Bytes of memory of one device."""
    return TARGETS[kind].memory

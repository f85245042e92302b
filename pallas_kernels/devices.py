"""Which implementation of each operation runs on which device: decided once, explicitly."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.errors import KernelError

# wgmma is an instruction of compute capability 9.0 alone: Blackwell has a different tensor core
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


@dataclass(frozen=True, slots=True)
class Backends:
    """The backend of each operation.

    Attributes:
        decode: for paged_decode_attention.
        prefill: for paged_prefill_attention.
        write_kv: for write_kv.
        reason: why these, in a sentence that a log line can show.
    """

    decode: str
    prefill: str
    write_kv: str
    reason: str


def _xla(reason: str) -> Backends:
    return Backends(decode="xla", prefill="xla", write_kv="xla", reason=reason)


def choose_backends(
    device_kind: str,
    platform: str,
    *,
    dtype: DTypeLike | None = None,
    head_dim: int | None = None,
    page_size: int | None = None,
    group: int | None = None,
) -> Backends:
    """The backends for a device, and for a model's shapes where these are given.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H200" or "cpu".
        platform: `jax.Device.platform`: "cpu", "gpu" (or "cuda") or "tpu".
        dtype: type of queries, keys and values. Without it and the next three the decode kernel
            is chosen by the device alone, and refuses a shape that it does not cover when called.
        head_dim: size of a head.
        page_size: tokens a page.
        group: query heads a KV head.

    Returns:
        The choice, with its reason.

    Raises:
        KernelError: no implementation has been chosen for this platform or device.
    """
    if platform == "cpu":
        return _xla("the CPU runs the XLA implementations")
    if platform == "tpu":
        return _xla(f"{device_kind} runs the XLA implementations")
    if platform not in ("gpu", "cuda") or not device_kind.startswith(("NVIDIA", "Tesla", "Quadro")):
        raise KernelError(
            "device", f"{device_kind!r} on platform {platform!r}", "a CPU, an NVIDIA GPU or a TPU"
        )
    words = device_kind.replace("-", " ").split()
    if not any(word in HOPPER_NAMES for word in words):
        return _xla(f"{device_kind} has no wgmma, which the Mosaic GPU decode kernel needs")
    refusal = mosaic_decode_refusal(
        dtype=dtype, head_dim=head_dim, page_size=page_size, group=group
    )
    if refusal is not None:
        return _xla(f"the Mosaic GPU decode kernel does not cover {refusal}")
    return Backends(
        decode="mosaic_gpu",
        prefill="xla",
        write_kv="xla",
        reason=f"{device_kind} runs the Mosaic GPU decode kernel",
    )


def mosaic_decode_refusal(
    *,
    dtype: DTypeLike | None = None,
    head_dim: int | None = None,
    page_size: int | None = None,
    group: int | None = None,
) -> KernelError | None:
    """Why the Mosaic GPU decode kernel does not cover a shape; None when it does.

    Only what is given is judged. Lives here, not with the kernel, because the choice is made where
    Mosaic GPU may not be importable.
    """
    if dtype is not None and jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return KernelError("dtype", jnp.dtype(dtype), "bfloat16 or float16")
    if head_dim is not None and head_dim not in (64, 128):
        return KernelError("head_dim", head_dim, "64 or 128")
    if page_size is not None and page_size not in (16, 32, 64):
        return KernelError("page_size", page_size, "16, 32 or 64 tokens")
    if group is not None and group > 64:
        return KernelError("heads / kv_heads", group, "at most 64")
    return None

"""Mosaic GPU: kernels for the matrix instructions of NVIDIA Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.backends.record import HOPPER, Backend, Implementation, Tuning
from pallas_kernels.coverage import AttentionShape, refused
from pallas_kernels.errors import KernelError
from pallas_kernels.pages import is_quantized

if TYPE_CHECKING:
    from pallas_kernels.quantized_matmul.coverage import MatmulShape

POOLS = tuple(jnp.dtype(name) for name in ("bfloat16", "float16", "int8", "float8_e4m3fn"))


@dataclass(frozen=True, slots=True)
class HopperDecodeTuning(Tuning):
    """The division of work of decode on Hopper (`mosaic_gpu`).

    Attributes:
        block_tokens: keys a step of the inner loop, 64 or 128.
        stages: blocks of keys and values on their way or being attended.
        waves: thread blocks wanted for every multiprocessor, as far as two fit.
    """

    block_tokens: int = 64
    stages: int = 4
    waves: int = 2


@dataclass(frozen=True, slots=True)
class HopperPrefillTuning(Tuning):
    """The division of work of prefill on Hopper (`mosaic_gpu`), as far as shared memory goes.

    Attributes:
        block_tokens: keys a step of the inner loop, 64 or 128.
        stages: blocks of keys and values on their way or being attended.
    """

    block_tokens: int = 128
    stages: int = 4


@dataclass(frozen=True, slots=True)
class HopperMatmulTuning(Tuning):
    """The division of work of a quantised product on Hopper (`mosaic_gpu`).

    Attributes:
        tile_m: rows of activations a thread block.
        stages: blocks on their way or being multiplied.
        splits: parts into which the contraction is divided; None chooses from the shapes.
    """

    tile_m: int = 64
    stages: int = 4
    splits: int | None = None


def covers_prefill(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic GPU prefill kernel does not cover a shape; None when it does."""
    pool, query = shape.pool_dtype, shape.query_dtype
    refusal = refused("kv_pages.dtype", pool, POOLS)
    if refusal is None and shape.token_scales:
        refusal = KernelError("k_scale", "by token", "one for the whole pool")
    refusal = refusal or refused("q.dtype", query, POOLS[:2])
    unlike = query is not None and pool is not None and not is_quantized(pool) and query != pool
    if refusal is None and unlike:
        refusal = KernelError("q.dtype", query, f"that of the pages, {pool}")
    return (
        refusal
        or refused("head_dim", shape.head_dim, (64, 80, 96, 128, 256))
        or refused("page_size", shape.page_size, (16, 32, 64, 128), " tokens")
    )


def covers_decode(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic GPU decode kernel does not cover a shape; None when it does."""
    refusal = covers_prefill(shape)
    if refusal is None and shape.group is not None and shape.group > 64:
        return KernelError("heads / kv_heads", shape.group, "at most 64")
    return refusal


def covers_matmul(shape: MatmulShape) -> KernelError | None:
    """Why the Mosaic GPU kernel does not cover a product; None when it does."""
    if shape.dtype not in (jnp.bfloat16, jnp.float16):
        return KernelError("x.dtype", shape.dtype, "bfloat16 or float16")
    if shape.stored == "int4" and (shape.inputs % shape.least_group or shape.inputs < shape.block):
        return KernelError(
            "inputs",
            shape.inputs,
            f"a multiple of {shape.least_group}, at least {shape.block}, for int4",
        )
    if shape.stored != "int4" and shape.inputs % shape.block:
        return KernelError(
            "inputs", shape.inputs, f"a multiple of {shape.block} for {shape.stored}"
        )
    if shape.outputs % 16 or shape.outputs < 128:
        return KernelError("outputs", shape.outputs, "a multiple of 16, at least 128")
    return None


BACKEND = Backend(
    "mosaic_gpu",
    (
        Implementation(
            "decode",
            "paged_attention.hopper.decode",
            covers_decode,
            (HOPPER,),
            True,
            HopperDecodeTuning,
            instruction="wgmma",
            launches=1,
        ),
        Implementation(
            "prefill",
            "paged_attention.hopper.prefill",
            covers_prefill,
            (HOPPER,),
            True,
            HopperPrefillTuning,
            in_one_order=True,
            instruction="wgmma",
            launches=1,
        ),
        Implementation(
            "matmul",
            "quantized_matmul.mosaic_gpu",
            covers_matmul,
            (HOPPER,),
            True,
            HopperMatmulTuning,
            converts_every=112,
            instruction="wgmma",
        ),
    ),
)

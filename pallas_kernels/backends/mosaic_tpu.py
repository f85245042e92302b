"""Mosaic TPU: kernels for the matrix unit and the scalar core of a TPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.backends.problems import Attention, Matmul
from pallas_kernels.backends.record import (
    TPU,
    TPU_CHIPS,
    Backend,
    Implementation,
    ProofCase,
    Tuning,
)
from pallas_kernels.coverage import AttentionShape, refused
from pallas_kernels.errors import KernelError
from pallas_kernels.tpu_pages import Order, memory_order

if TYPE_CHECKING:
    from pallas_kernels.quantized_matmul.coverage import MatmulShape

POOLS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "int8", "float8_e4m3fn"))
TABLE_ENTRIES = 192 << 10  # of 4 bytes, in 1 MiB of scalar memory with the rest of the scalars


@dataclass(frozen=True, slots=True)
class TpuDecodeTuning(Tuning):
    """The division of work of decode on a TPU (`mosaic_tpu`).

    Attributes:
        block_tokens: keys a step of the inner loop, a multiple of 128.
        stages: blocks of keys and values on their way or being attended.
        cores: TensorCores that share the slots.
    """

    block_tokens: int = 256
    stages: int = 4
    cores: int = 1


@dataclass(frozen=True, slots=True)
class TpuPrefillTuning(Tuning):
    """The division of work of prefill on a TPU (`mosaic_tpu`).

    Attributes:
        tile_rows: rows of queries (a row is one token of one query head) a grid step.
        block_tokens: keys a step of the inner loop, a multiple of 128.
        stages: blocks of keys and values on their way or being attended.
        cores: TensorCores that share the tiles.
    """

    tile_rows: int = 256
    block_tokens: int = 256
    stages: int = 4
    cores: int = 1


@dataclass(frozen=True, slots=True)
class TpuMatmulTuning(Tuning):
    """The division of work of a quantised product on a TPU (`mosaic_tpu`).

    Attributes:
        tile_m: rows of activations a grid step.
        tile_n: rows of the weight (output channels).
        tile_k: contracted elements a step of the inner loop.
    """

    tile_m: int = 64
    tile_n: int = 128
    tile_k: int = 128


def covers(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic TPU kernels do not cover a shape; None when they do."""
    refusal = (
        refused("kv_pages.dtype", shape.pool_dtype, POOLS)
        or refused("q.dtype", shape.query_dtype, POOLS[:2])
        # another is padded in memory, and XLA would bring the pool into another order for a kernel
        or refused("head_dim", shape.head_dim, (128, 256))
    )
    if refusal is None and shape.head_dim == 256 and shape.kv_heads and shape.kv_heads % 8:
        refusal = KernelError("kv_heads", shape.kv_heads, "a multiple of 8 where head_dim is 256")
    return refusal or refused("page_size", shape.page_size, (16, 32, 64, 128), " tokens")


def covers_write(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic TPU kernels do not write pages in place; None when they do."""
    refusal = covers(shape)
    if refusal is not None or shape.pool_dtype is None or shape.kv_heads is None:
        return refusal
    # four tokens share a 32-bit row there, and a DMA writes whole ones
    if memory_order(shape.kv_heads, shape.pool_dtype) is Order.HEADS:
        return KernelError("kv_heads", shape.kv_heads, "4 or a multiple of 8 for 8-bit pages")
    return None


def covers_decode_and_write(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic TPU kernel does not attend and write at once; None when it does."""
    if shape.token_scales:
        return KernelError("k_scale", "by token", "one for the whole pool")
    return covers_write(shape)


def covers_table(shape: tuple[int, ...]) -> KernelError | None:
    """Why a page table [rows, pages] does not fit the scalar memory of a TPU; None when it does."""
    if math.prod(shape) > TABLE_ENTRIES:
        return KernelError("page_table.shape", shape, f"at most {TABLE_ENTRIES} entries")
    return None


def covers_matmul(shape: MatmulShape) -> KernelError | None:
    """Why the Mosaic TPU kernel does not cover a product; None when it does."""
    if shape.activations == "fp8":
        return KernelError("activations", "'fp8'", "'float' or 'int8'")
    if shape.stored == "fp8" and shape.group is not None:
        return KernelError("weight.scale", "by group", "one an output or one in all, for fp8")
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return KernelError("x.dtype", shape.dtype, "bfloat16 or float32")
    if shape.inputs % shape.block:
        return KernelError(
            "inputs", shape.inputs, f"a multiple of {shape.block} for {shape.stored}"
        )
    if shape.outputs % 128:
        return KernelError("outputs", shape.outputs, "a multiple of 128")
    return None


BACKEND = Backend(
    "mosaic_tpu",
    (
        Implementation(
            "decode",
            "paged_attention.tpu.decode",
            covers,
            (TPU,),
            True,
            TpuDecodeTuning,
            instruction="matmul",
            chips=TPU_CHIPS,
            proved=(
                ProofCase(Attention(rows=1)),
                ProofCase(Attention(context=8192), quick=TPU_CHIPS),
                ProofCase(Attention(context=8192, window=4096)),
                ProofCase(Attention(16, 32, 32, page_size=128)),
                ProofCase(Attention(16, 16, 8, 256, soft_cap=50.0)),
                ProofCase(Attention(16, 64, 8, sinks=True)),
                ProofCase(Attention(16, dtype="float32")),
                ProofCase(Attention(16, pages="int8")),
                ProofCase(Attention(16, pages="int8", scales="token")),
                ProofCase(Attention(16, pages="float8_e4m3fn")),
                ProofCase(Attention(16, 64, shards=8)),
                ProofCase(Attention(queries=4)),
                ProofCase(Attention(queries=8), quick=("v5e", "v6e")),
                ProofCase(Attention(16, 32, 32, page_size=128, queries=8)),
                ProofCase(Attention(16, 28, 4, queries=8, window=4096)),
                ProofCase(Attention(16, 12, 2, queries=4, sinks=True)),
                ProofCase(Attention(16, 64, 8, queries=8)),
                ProofCase(Attention(16, 16, 8, 256, queries=8)),
                ProofCase(Attention(16, queries=8, dtype="float32")),
                ProofCase(Attention(16, queries=8, pages="int8", scales="token")),
                ProofCase(Attention(16, queries=8, pages="float8_e4m3fn")),
                ProofCase(Attention(16, 8, 1, pages="int8")),
                ProofCase(Attention(16, 24, 3, 128, 128, pages="int8")),
            ),
        ),
        Implementation(
            "decode_and_write",
            "paged_attention.tpu.decode",
            covers_decode_and_write,
            (TPU,),
            True,
            TpuDecodeTuning,
            instruction="matmul",
            chips=TPU_CHIPS,
            proved=(
                ProofCase(Attention(16, queries=4)),
                ProofCase(Attention(context=8192, queries=8)),
                ProofCase(Attention(16, 32, 32, page_size=128, queries=8)),
                ProofCase(Attention(16, 28, 4, window=4096, queries=8)),
                ProofCase(Attention(16, queries=8, dtype="float32")),
                ProofCase(Attention(16, queries=8, pages="int8")),
                ProofCase(Attention(context=8192), quick=TPU_CHIPS),
                ProofCase(Attention(16, 32, 32, page_size=128)),
                ProofCase(Attention(16, 28, 4, window=4096)),
                ProofCase(Attention(16, 12, 2, sinks=True)),
                ProofCase(Attention(16, 9, 3)),
                ProofCase(Attention(16, 16, 8, 256)),
                ProofCase(Attention(16, dtype="float32")),
                ProofCase(Attention(16, pages="int8")),
                ProofCase(Attention(16, 32, 4, pages="int8")),
                ProofCase(Attention(16, pages="float8_e4m3fn")),
                ProofCase(Attention(16, 64, shards=8)),
            ),
        ),
        Implementation(
            "prefill",
            "paged_attention.tpu.prefill",
            covers,
            (TPU,),
            True,
            TpuPrefillTuning,
            instruction="matmul",
            chips=TPU_CHIPS,
            proved=(
                ProofCase(Attention(2048), quick=TPU_CHIPS),
                ProofCase(Attention(256, lanes=1)),
                ProofCase(Attention(2048, 16, 8, 256, soft_cap=50.0)),
                ProofCase(Attention(2048, window=1024, sinks=True)),
                ProofCase(Attention(2048, dtype="float32")),
                ProofCase(Attention(2048, pages="int8", scales="token")),
                ProofCase(Attention(2048, pages="float8_e4m3fn")),
            ),
        ),
        Implementation(
            "write_kv",
            "write_kv.mosaic_tpu",
            covers_write,
            (TPU,),
            True,
            whole_pages=True,
            instruction="dma",
            chips=TPU_CHIPS,
            proved=(
                ProofCase(Attention(2048), quick=TPU_CHIPS),
                ProofCase(Attention(16, page_size=128)),
                ProofCase(Attention(2048, pages="int8")),
                ProofCase(Attention(2048, pages="float8_e4m3fn")),
                ProofCase(
                    Attention(2048, pages="int8"), quick=("v5e",), operation="write_kv_scaled"
                ),
            ),
        ),
        Implementation(
            "matmul",
            "quantized_matmul.mosaic_tpu",
            covers_matmul,
            (TPU,),
            True,
            TpuMatmulTuning,
            instruction="matmul",
            chips=TPU_CHIPS,
            proved=(
                ProofCase(Matmul(), quick=("v5e",)),
                ProofCase(Matmul(1)),
                ProofCase(Matmul(16, 5632, 2048, group=32)),
                ProofCase(Matmul(2048, asymmetric=True)),
                ProofCase(Matmul(weight="int8")),
                ProofCase(Matmul(2048, weight="fp8")),
            ),
        ),
    ),
)

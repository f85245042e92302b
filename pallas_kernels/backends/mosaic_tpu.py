"""Mosaic TPU: kernels for the matrix unit and the scalar core of a TPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.backends.record import TPU, Backend, Implementation, Tuning
from pallas_kernels.coverage import AttentionShape, refused
from pallas_kernels.errors import KernelError
from pallas_kernels.tpu_pages import Order, memory_order

if TYPE_CHECKING:
    import jax

    from pallas_kernels.quantized_matmul.coverage import MatmulShape
    from pallas_kernels.route.coverage import RouteShape

POOLS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "int8", "float8_e4m3fn"))
TABLE_ENTRIES = 192 << 10  # of 4 bytes, in 1 MiB of scalar memory with the rest of the scalars
LENGTH_MULTIPLE = 128  # elements or words of a row of a group's matrix
MOST_ROUTED = 256  # tokens and experts: what a kernel counts in bfloat16 stays exact


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


def head_rows(shape: AttentionShape) -> int:
    """Rows of the pool that a head of a shape is, for the kernels to see the pool without a copy.

    XLA stores the lanes of a row of 256 in two tiles, and tiles of fewer than 8 heads in another
    order than a matrix of such rows has.
    """
    if shape.head_rows is not None and shape.head_rows > 1:
        return shape.head_rows
    return 2 if shape.head_dim == 256 and (shape.kv_heads or 8) % 8 else 1


def covers(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic TPU kernels do not cover a shape; None when they do."""
    refusal = (
        refused("kv_pages.dtype", shape.pool_dtype, POOLS)
        or refused("q.dtype", shape.query_dtype, POOLS[:2])
        # another is padded in memory, and XLA would bring the pool into another order for a kernel
        or refused("head_dim", shape.head_dim, (128, 256))
    )
    if refusal is None and head_rows(shape) == 2:
        if shape.head_rows == 1:
            allowed = "a multiple of 8, or heads of 256 as two rows of 128"
            refusal = KernelError("kv_heads", shape.kv_heads, allowed)
        if shape.token_scales:
            refusal = KernelError("k_scale", "by token", "one for the whole pool")
    return refusal or refused("page_size", shape.page_size, (16, 32, 64, 128), " tokens")


def covers_write(shape: AttentionShape) -> KernelError | None:
    """Why the Mosaic TPU kernels do not write pages in place; None when they do."""
    refusal = covers(shape)
    if refusal is not None or shape.pool_dtype is None or shape.kv_heads is None:
        return refusal
    # four tokens share a 32-bit row there, and a DMA writes whole ones
    rows = shape.kv_heads * head_rows(shape)
    if memory_order(rows, shape.pool_dtype) is Order.HEADS:
        return KernelError("kv_heads", rows, "rows of 4 or a multiple of 8 for 8-bit pages")
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


def covers_grouped(weight: jax.Array) -> KernelError | None:
    """Why the Mosaic TPU kernel does not multiply with the elements of a weight; None when it does.

    Args:
        weight: [groups, outputs, inputs] elements as they are stored.
    """
    if weight.dtype == jnp.float16:
        return KernelError("weight.dtype", weight.dtype, "bfloat16, float32, or of few bits")
    if weight.ndim != 3 or weight.shape[1] % 128:
        return KernelError("weight.shape", weight.shape, "outputs that are a multiple of 128")
    if weight.shape[2] % LENGTH_MULTIPLE:
        # XLA stores others with the outputs along lanes, and would copy all of them for the kernel
        allowed = f"rows of a multiple of {LENGTH_MULTIPLE} elements or words"
        return KernelError("weight.shape", weight.shape, allowed)
    return None


def covers_rotary(qkv: jax.Array) -> KernelError | None:
    """Why the Mosaic TPU kernel does not rotate a projection [T, KVH, G + 2, D]; None when it
    does."""
    if qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return KernelError("qkv.dtype", qkv.dtype, "bfloat16 or float32")
    if qkv.shape[3] % 128:
        return KernelError("qkv.shape", qkv.shape, "heads of a multiple of 128")
    return None


def covers_route(shape: RouteShape) -> KernelError | None:
    """Why the Mosaic TPU kernel does not choose the experts of tokens; None when it does."""
    if max(shape.tokens, shape.groups) > MOST_ROUTED:
        allowed = f"at most {MOST_ROUTED} tokens and experts"
        return KernelError("scores.shape", (shape.tokens, shape.groups), allowed)
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
            table_entries=TABLE_ENTRIES,
            head_rows=head_rows,
            instruction="matmul",
        ),
        Implementation(
            "decode_and_write",
            "paged_attention.tpu.decode",
            covers_decode_and_write,
            (TPU,),
            True,
            TpuDecodeTuning,
            table_entries=TABLE_ENTRIES,
            head_rows=head_rows,
            instruction="matmul",
        ),
        Implementation(
            "prefill",
            "paged_attention.tpu.prefill",
            covers,
            (TPU,),
            True,
            TpuPrefillTuning,
            in_one_order=True,
            table_entries=TABLE_ENTRIES,
            head_rows=head_rows,
            instruction="matmul",
        ),
        Implementation(
            "write_kv",
            "write_kv.mosaic_tpu",
            covers_write,
            (TPU,),
            True,
            whole_pages=True,
            instruction="dma",
        ),
        Implementation(
            "grouped_linear",
            "grouped_linear.mosaic_tpu",
            covers_grouped,
            (TPU,),
            True,
            instruction="matmul",
        ),
        Implementation("rotary", "rotary.mosaic_tpu", covers_rotary, (TPU,), True),
        Implementation(
            "linear_layer", "linear.mosaic_tpu", covers_matmul, (TPU,), True, instruction="matmul"
        ),
        Implementation("route", "route.mosaic_tpu", covers_route, (TPU,), True),
        Implementation(
            "matmul",
            "quantized_matmul.mosaic_tpu",
            covers_matmul,
            (TPU,),
            True,
            TpuMatmulTuning,
            instruction="matmul",
        ),
    ),
)

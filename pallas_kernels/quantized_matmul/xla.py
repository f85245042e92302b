"""quantized_matmul by XLA alone, on any device, in the form that each platform runs well.

XLA:CPU reaches its fast matrix library for bfloat16 x bfloat16 -> float32 and int8 x int8 -> int32
with at least two rows, and never fuses a conversion into a product: converting the whole weight
first costs more than the product itself. So on a CPU the weight is dequantised block by block of
output channels, each small enough to stay in the cache. On other devices the conversion is left to
XLA's fusion.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.operands import Operands, product
from pallas_kernels.quantized_matmul.reference import integer_product

CPU_BLOCK = 256  # output channels dequantised at a time
MIN_ROWS = 2  # one row alone misses XLA:CPU's matrix library


def matmul(operands: Operands, *, out_dtype: DTypeLike) -> jax.Array:  # [1, M, N]
    """x @ weight.T as one part, with sums in float32, or in int32 where both are integers."""
    rows = operands.rows.shape[0]
    if rows < MIN_ROWS:
        more = {"rows": jnp.pad(operands.rows, ((0, 1), (0, 0)))}
        if operands.row_scale is not None:
            more["row_scale"] = jnp.pad(operands.row_scale, (0, 1))
        operands = operands._replace(**more)
    if operands.row_scale is None:
        out = _float_product(operands, out_dtype)
    elif operands.rows.dtype == jnp.int8:
        out = integer_product(operands)
    else:
        wide = operands._replace(rows=operands.rows.astype(jnp.bfloat16))
        out = _float_product(wide, jnp.float32) * operands.column
    return out[None, :rows].astype(out_dtype)


def _float_product(operands: Operands, out_dtype: DTypeLike) -> jax.Array:
    """[M, N] of x [M, K] and the dequantised weight."""
    by_blocks, whole = (functools.partial(f, out_dtype=out_dtype) for f in (_by_blocks, _product))
    return lax.platform_dependent(operands, cpu=by_blocks, default=whole)


def _product(operands: Operands, out_dtype: DTypeLike) -> jax.Array:
    x = operands.rows
    if operands.group or operands.is_int4:
        return product(x, operands.matrix().astype(x.dtype), out_dtype)
    # 8-bit values are exact in 16-bit floating point, so their scale can wait for the sum
    out = product(x, operands.stored.astype(x.dtype), jnp.float32)
    return (out * operands.scales[0]).astype(out_dtype)


def _by_blocks(operands: Operands, out_dtype: DTypeLike) -> jax.Array:
    outputs = operands.outputs
    whole = outputs // CPU_BLOCK
    if operands.rows.dtype == jnp.float16:
        # the matrix library knows no float16
        operands = operands._replace(rows=operands.rows.astype(jnp.float32))

    def block(first: jax.Array | int, size: int) -> jax.Array:
        """The product with so many output channels."""

        def held(array: jax.Array, axis: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, first, size, axis)

        zeros = None if operands.zeros is None else held(operands.zeros, 1)
        stored, scales = held(operands.stored, 0), held(operands.scales, 1)
        part = operands._replace(stored=stored, scales=scales, zeros=zeros)
        return _product(part, jnp.float32)

    parts = []
    if whole:
        starts = jnp.arange(whole) * CPU_BLOCK
        blocks = lax.map(lambda first: block(first, CPU_BLOCK), starts)
        parts.append(blocks.transpose(1, 0, 2).reshape(operands.rows.shape[0], -1))
    if outputs % CPU_BLOCK:
        parts.append(block(whole * CPU_BLOCK, outputs % CPU_BLOCK))
    return jnp.concatenate(parts, axis=1).astype(out_dtype)

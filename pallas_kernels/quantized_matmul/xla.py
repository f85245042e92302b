"""quantized_matmul by XLA alone, on any device, in the form that each platform runs well.

XLA:CPU reaches its fast matrix library for bfloat16 x bfloat16 -> float32 and int8 x int8 -> int32
with at least two rows, and never fuses a conversion into a product: converting the whole weight
first costs more than the product itself. So on a CPU the weight is dequantised block by block of
output channels, each small enough to stay in the cache. On other devices the conversion is left to
XLA's fusion.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.activations import RoundedRows, Rows
from pallas_kernels.quantized_matmul.formats import (
    QuantizedWeight,
    dequantize,
    outputs_of,
)
from pallas_kernels.quantized_matmul.reference import CONTRACT_INPUTS, integer_product

CPU_BLOCK = 256  # output channels dequantised at a time
MIN_ROWS = 2  # one row alone misses XLA:CPU's matrix library


@functools.partial(jax.jit, static_argnames="out_dtype")
def matmul(x: Rows, weight: QuantizedWeight, *, out_dtype: DTypeLike) -> jax.Array:
    """x [M, K] @ weight [N, K].T as one part [1, M, N], with sums in float32, or in int32 where
    both are integers."""
    rows = x.shape[0]
    if rows < MIN_ROWS:
        x = jax.tree.map(lambda part: jnp.pad(part, ((0, 1), (0, 0))[: part.ndim]), x)
    if not isinstance(x, RoundedRows):
        out = _float_product(x, weight, out_dtype)
    elif x.values.dtype == jnp.int8:
        out = integer_product(x, weight)
    else:
        out = _float_product(x.values.astype(jnp.bfloat16), weight, jnp.float32) * x.column
    return out[None, :rows].astype(out_dtype)


def _float_product(x: jax.Array, weight: QuantizedWeight, out_dtype: DTypeLike) -> jax.Array:
    """[M, N] of x [M, K] and the dequantised weight."""
    by_blocks, whole = (functools.partial(f, out_dtype=out_dtype) for f in (_by_blocks, _product))
    return lax.platform_dependent(x, weight, cpu=by_blocks, default=whole)


def _product(x: jax.Array, weight: QuantizedWeight, out_dtype: DTypeLike) -> jax.Array:
    # 8-bit values are exact in 16-bit floating point, so their scale can wait for the sum
    if weight[1].ndim == 2:
        matrix, scale = dequantize(weight, x.shape[1]).astype(x.dtype), None
    else:
        matrix, scale = weight[0].astype(x.dtype), weight[1]
    out = lax.dot_general(
        x,
        matrix,
        CONTRACT_INPUTS,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype if scale is None else jnp.float32,
    )
    return out if scale is None else (out * scale).astype(out_dtype)


def _by_blocks(x: jax.Array, weight: QuantizedWeight, out_dtype: DTypeLike) -> jax.Array:
    outputs = outputs_of(weight)
    whole = outputs // CPU_BLOCK
    if x.dtype == jnp.float16:
        x = x.astype(jnp.float32)  # the matrix library knows no float16

    def block(first: jax.Array | int, size: int) -> jax.Array:
        """The product with so many output channels, which elements have first and scales last."""
        held: list[Any] = [
            array
            if array is None or array.ndim == 0
            else lax.dynamic_slice_in_dim(array, first, size, axis and array.ndim - 1)
            for axis, array in enumerate(weight)
        ]
        return _product(x, type(weight)(*held), jnp.float32)

    parts = []
    if whole:
        starts = jnp.arange(whole) * CPU_BLOCK
        blocks = lax.map(lambda first: block(first, CPU_BLOCK), starts)
        parts.append(blocks.transpose(1, 0, 2).reshape(x.shape[0], -1))
    if outputs % CPU_BLOCK:
        parts.append(block(whole * CPU_BLOCK, outputs % CPU_BLOCK))
    return jnp.concatenate(parts, axis=1).astype(out_dtype)

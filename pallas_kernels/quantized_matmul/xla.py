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

from pallas_kernels.quantized_matmul.activations import rounded_rows
from pallas_kernels.quantized_matmul.formats import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    dequantize,
    outputs_of,
)
from pallas_kernels.quantized_matmul.reference import CONTRACT_INPUTS, integer_product

CPU_BLOCK = 256  # output channels dequantised at a time
MIN_ROWS = 2  # one row alone misses XLA:CPU's matrix library


@functools.partial(jax.jit, static_argnames=("activations", "out_dtype"))
def matmul(
    x: jax.Array,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    activations: str,
    out_dtype: DTypeLike,
    input_scale: jax.Array | None = None,  # float32[1]
) -> jax.Array:  # [M, N]
    """x @ weight.T with sums in float32, or in int32 for activations="int8"."""
    rows = x.shape[0]
    if rows < MIN_ROWS:
        x = jnp.pad(x, ((0, MIN_ROWS - rows), (0, 0)))
    values, row_scale = rounded_rows(x, activations, input_scale)
    if row_scale is None:
        out = _float_product(x, weight)
    elif activations == "int8":
        out = integer_product(values, row_scale, weight)
    else:
        out = _float_product(values.astype(jnp.bfloat16), weight) * row_scale[:, None]
    return out[:rows].astype(out_dtype)


def _float_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """float32[M, N] of x [M, K] and the dequantised weight."""
    return lax.platform_dependent(x, weight, cpu=_by_blocks, default=_product)


def _product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    # 8-bit values are exact in 16-bit floating point, so their scale can wait for the sum
    if isinstance(weight, Int4Weight):
        matrix, scale = dequantize(weight, x.shape[1]).astype(x.dtype), None
    else:
        matrix, scale = weight.values.astype(x.dtype), weight.scale
    out = lax.dot_general(
        x,
        matrix,
        CONTRACT_INPUTS,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out if scale is None else out * scale


def _by_blocks(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    outputs = outputs_of(weight)
    whole = outputs // CPU_BLOCK
    if x.dtype == jnp.float16:
        x = x.astype(jnp.float32)  # the matrix library knows no float16
    parts = []
    if whole:
        blocks = lax.map(lambda block: _product(x, block), _blocks(weight, whole))
        parts.append(blocks.transpose(1, 0, 2).reshape(x.shape[0], -1))
    if outputs % CPU_BLOCK:
        parts.append(_product(x, _tail(weight, whole * CPU_BLOCK)))
    return jnp.concatenate(parts, axis=1)


def _blocks(weight: QuantizedWeight, count: int) -> QuantizedWeight:
    """The first `count` blocks of output channels, as the leading axis of every array."""
    used = count * CPU_BLOCK

    def by_row(array: jax.Array) -> jax.Array:
        return array[:used].reshape(count, CPU_BLOCK, *array.shape[1:])

    def by_column(array: jax.Array | None) -> Any:
        if array is None:
            return None
        return array[:, :used].reshape(-1, count, CPU_BLOCK).transpose(1, 0, 2)

    if isinstance(weight, Int4Weight):
        return Int4Weight(by_row(weight.packed), by_column(weight.scales), by_column(weight.zeros))
    if weight.scale.ndim == 0:
        return Fp8Weight(by_row(weight.values), jnp.broadcast_to(weight.scale, (count,)))
    kind = Int8Weight if isinstance(weight, Int8Weight) else Fp8Weight
    return kind(by_row(weight.values), by_row(weight.scale))


def _tail(weight: QuantizedWeight, start: int) -> QuantizedWeight:
    """The output channels from `start` on."""
    if isinstance(weight, Int4Weight):
        zeros = None if weight.zeros is None else weight.zeros[:, start:]
        return Int4Weight(weight.packed[start:], weight.scales[:, start:], zeros)
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[start:], weight.scale[start:])
    scale = weight.scale if weight.scale.ndim == 0 else weight.scale[start:]
    return Fp8Weight(weight.values[start:], scale)

"""The definition of quantized_matmul in plain JAX, in float32 (int32 for integers)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.activations import rounded_rows
from pallas_kernels.quantized_matmul.formats import QuantizedWeight, dequantize

CONTRACT_INPUTS = (((1,), (1,)), ((), ()))


def integer_product(
    rows: jax.Array,  # int8[M, K]
    row_scale: jax.Array,  # float32[M]
    weight: QuantizedWeight,  # int8[N, K]
) -> jax.Array:  # float32[M, N]
    """The product of integers, summed in int32, times the scales of both."""
    total = lax.dot_general(rows, weight[0], CONTRACT_INPUTS, preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * row_scale[:, None] * weight[1]


@functools.partial(jax.jit, static_argnames=("activations", "out_dtype"))
def matmul(
    x: jax.Array,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    activations: str,
    out_dtype: DTypeLike,
    input_scale: jax.Array | None = None,  # float32[1]
) -> jax.Array:  # [M, N]
    """x @ weight.T, both converted to float32 first."""
    rows, row_scale = rounded_rows(x, activations, input_scale)
    if row_scale is not None and activations == "int8":
        return integer_product(rows, row_scale, weight).astype(out_dtype)
    wide = rows.astype(jnp.float32)
    if row_scale is not None:
        wide = wide * row_scale[:, None]
    out = lax.dot_general(
        wide,
        dequantize(weight, x.shape[1]),
        CONTRACT_INPUTS,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.astype(out_dtype)

"""The definition of quantized_matmul in plain JAX, in float32 (int32 for integers)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.activations import RoundedRows, Rows, split_rows
from pallas_kernels.quantized_matmul.formats import QuantizedWeight, dequantize

CONTRACT_INPUTS = (((1,), (1,)), ((), ()))


def integer_product(rows: RoundedRows, weight: QuantizedWeight) -> jax.Array:  # float32[M, N]
    """The product of integers, summed in int32, times the scales of both."""
    total = lax.dot_general(
        rows.values, weight[0], CONTRACT_INPUTS, preferred_element_type=jnp.int32
    )
    return total.astype(jnp.float32) * rows.column * weight[1]


@functools.partial(jax.jit, static_argnames="out_dtype")
def matmul(x: Rows, weight: QuantizedWeight, *, out_dtype: DTypeLike) -> jax.Array:
    """x [M, K] @ weight [N, K].T as one part [1, M, N], both converted to float32 first."""
    values, _ = split_rows(x)
    if isinstance(x, RoundedRows) and values.dtype == jnp.int8:
        return integer_product(x, weight).astype(out_dtype)[None]
    wide = values.astype(jnp.float32)
    out = lax.dot_general(
        wide * x.column if isinstance(x, RoundedRows) else wide,
        dequantize(weight, x.shape[1]),
        CONTRACT_INPUTS,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.astype(out_dtype)[None]

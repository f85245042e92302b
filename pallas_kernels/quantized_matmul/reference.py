"""The definition of quantized_matmul in plain JAX, in float32 (int32 for integers)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.activations import quantize_rows_fp8, quantize_rows_int8
from pallas_kernels.quantized_matmul.formats import QuantizedWeight, dequantize

CONTRACT_INPUTS = (((1,), (1,)), ((), ()))


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
    if activations == "int8":
        rows, row_scale = quantize_rows_int8(x, input_scale)
        total = lax.dot_general(rows, weight[0], CONTRACT_INPUTS, preferred_element_type=jnp.int32)
        out = total.astype(jnp.float32) * row_scale[:, None] * weight[1]
        return out.astype(out_dtype)
    if activations == "fp8":
        rows, row_scale = quantize_rows_fp8(x, input_scale)
        wide = rows.astype(jnp.float32) * row_scale[:, None]
    else:
        wide = x.astype(jnp.float32)
    out = lax.dot_general(
        wide,
        dequantize(weight, x.shape[1]),
        CONTRACT_INPUTS,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.astype(out_dtype)

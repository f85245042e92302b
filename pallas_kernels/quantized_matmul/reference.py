"""The definition of quantized_matmul in plain JAX, in float32 (int32 for integers)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.quantized_matmul.operands import Operands, product


def integer_product(operands: Operands) -> jax.Array:  # float32[M, N]
    """The product of integers, summed in int32, times the scales of both."""
    total = product(operands.rows, operands.stored, jnp.int32).astype(jnp.float32)
    return total * operands.column * operands.scales[0]


def matmul(operands: Operands, *, out_dtype: DTypeLike) -> jax.Array:  # [1, M, N]
    """x @ weight.T as one part, both converted to float32 first."""
    if operands.rows.dtype == jnp.int8:
        return integer_product(operands).astype(out_dtype)[None]
    wide = operands.rows.astype(jnp.float32)
    if operands.row_scale is not None:
        wide = wide * operands.column
    return product(wide, operands.matrix(), jnp.float32).astype(out_dtype)[None]

"""Residual stream and norm by Pallas' Triton backend: one kernel, each row read once.

A program has one row, which stays in its registers from the sum to the norm. XLA takes two kernels,
because the sum has a second use, and reads the row of one in the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.paged_attention.triton.block import padded
from pallas_kernels.quantized_matmul import Rounding, Rows
from pallas_kernels.quantized_matmul.activations import result_of

NUM_WARPS = 8  # 16 numbers a thread in rows of 4096


def _kernel(
    residual: Any,  # [T, E]
    product: Any,  # [S, T, E]
    weight: Any,  # [E]
    rounding: Rounding | None,  # with a reference of float32[1], if that is given
    normed: Any,  # [T, E], or RoundedRows of references
    stream: Any,  # [T, E]
    *,
    eps: float,
) -> None:
    row, (parts, _, columns) = pl.program_id(0), product.shape
    dtype = stream.dtype
    column = jnp.arange(padded(columns))
    inside = None if column.shape[0] == columns else column < columns

    def loaded(place: Any) -> jax.Array:
        other = None if inside is None else 0
        return plt.load(place, mask=inside, other=other).astype(jnp.float32)

    def rounded(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)

    total = loaded(product.at[0, row, column])
    for part in range(1, parts):
        total += loaded(product.at[part, row, column])
    summed = rounded(loaded(residual.at[row, column]) + rounded(total))
    plt.store(stream.at[row, column], summed.astype(dtype), mask=inside)
    factor = lax.rsqrt((summed * summed).sum() / columns + eps)
    scaled = rounded(summed * factor) * loaded(weight.at[column])
    if rounding is None:
        plt.store(normed.at[row, column], scaled.astype(dtype), mask=inside)
        return
    scaled = rounded(scaled)
    if rounding.scale is None:
        factor, scale = rounding.stretch(jnp.abs(scaled).max())
    else:
        scale = rounding.scale[0]
        factor = 1.0 / scale
    plt.store(normed.values.at[row, column], rounding.cut(scaled * factor), mask=inside)
    plt.store(normed.scale.at[row], scale)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def residual_norm(
    residual: jax.Array,  # [T, E]
    product: jax.Array,  # [S, T, E]
    weight: jax.Array,  # [E]
    *,
    eps: float,
    rounding: Rounding | None,
    interpret: bool | None = None,
) -> tuple[Rows, jax.Array]:  # [T, E], [T, E]
    """As `pallas_kernels.residual_norm.residual_norm`."""
    like = functools.partial(result_like, residual)
    shape, dtype = residual.shape, residual.dtype
    normed, stream = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=(result_of(rounding, like, shape, dtype), like(shape, dtype)),
        grid=(residual.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpreter.is_used_by_triton(interpret),
        name="residual_norm",
    )(residual, product, weight, rounding)
    return normed, stream

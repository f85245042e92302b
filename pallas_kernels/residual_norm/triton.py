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

NUM_WARPS = 8  # 16 numbers a thread in rows of 4096


def _kernel(
    residual: Any,  # [T, E]
    product: Any,  # [S, T, E]
    weight: Any,  # [E]
    normed: Any,  # [T, E]
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
    plt.store(normed.at[row, column], scaled.astype(dtype), mask=inside)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def residual_norm(
    residual: jax.Array,  # [T, E]
    product: jax.Array,  # [S, T, E]
    weight: jax.Array,  # [E]
    *,
    eps: float,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:  # [T, E], [T, E]
    """As `pallas_kernels.residual_norm.residual_norm`."""
    like = result_like(residual, residual.shape, residual.dtype)
    normed, stream = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=(like, like),
        grid=(residual.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpreter.is_used_by_triton(interpret),
        name="residual_norm",
    )(residual, product, weight)
    return normed, stream

"""Rows of a product by Pallas' Triton backend: one kernel from float32 parts to rounded rows.

A program has one row where the row is rounded by its own largest number, which has to be known
before any number is written: a row of up to `CHUNK` columns stays in registers meanwhile, a longer
one is computed once more from the cache. Where no such number is wanted, a program has one chunk.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.paged_attention.triton.block import padded
from pallas_kernels.quantized_matmul import Rounding, Rows
from pallas_kernels.quantized_matmul.activations import result_of

CHUNK = 16384  # columns of a result that a program holds
WARP_COLUMNS = 1024  # 32 numbers a thread, of gate and of up
LEAST_WARPS, MOST_WARPS = 4, 16
TWICE_ROOT, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # of GELU by tanh


def _kernel(
    product: Any,  # [S, M, N]
    rounding: Rounding | None,  # with a reference of float32[1], if that is given
    out: Any,  # [M, width], or RoundedRows of references
    *,
    dtype: np.dtype,
    gate: str | None,
    chunk: int,
) -> None:
    row, (parts, _, columns) = pl.program_id(0), product.shape
    width = columns // 2 if gate else columns
    chunks = -(-width // chunk)

    def cut(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)

    def computed(index: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The columns of a chunk, which of them are there, and their numbers."""
        column = index * chunk + jnp.arange(chunk)
        inside = column < width

        def summed(place: jax.Array) -> jax.Array:
            total = jnp.zeros((chunk,), jnp.float32)
            for part in range(parts):
                held = plt.load(product.at[part, row, place], mask=inside, other=0)
                total += held.astype(jnp.float32)
            return cut(total)

        if gate is None:
            return column, inside, summed(column)
        x, up = summed(2 * column), summed(2 * column + 1)
        # (1 + tanh(y)) / 2 is the logistic function of 2 y
        inner = x if gate == "silu" else TWICE_ROOT * (x + CUBIC * x * x * x)
        return column, inside, cut(cut(x / (1.0 + jnp.exp(-inner))) * up)

    if rounding is None or rounding.scale is not None:
        column, inside, values = computed(pl.program_id(1))
        if rounding is None:
            plt.store(out.at[row, column], values.astype(dtype), mask=inside)
            return
        static = rounding.scale[0]
        rounded = rounding.cut(values * (1.0 / static))
        plt.store(out.values.at[row, column], rounded, mask=inside)
        plt.store(out.scale.at[row], static)
        return
    only = computed(0) if chunks == 1 else None

    def highest_of(index: jax.Array, most: jax.Array) -> jax.Array:
        _, _, values = only or computed(index)
        return jnp.maximum(most, jnp.abs(values).max())

    factor, scale = rounding.stretch(lax.fori_loop(0, chunks, highest_of, jnp.float32(0.0)))

    def write(index: jax.Array, carry: None) -> None:
        column, inside, values = only or computed(index)
        plt.store(out.values.at[row, column], rounding.cut(values * factor), mask=inside)

    lax.fori_loop(0, chunks, write, None)
    plt.store(out.scale.at[row], scale)


@functools.partial(jax.jit, static_argnames=("dtype", "gate", "interpret"))
def finish_rows(
    product: jax.Array,  # [S, M, N]
    *,
    dtype: np.dtype,
    gate: str | None,
    rounding: Rounding | None,
    interpret: bool | None = None,
) -> Rows:  # [M, N], or [M, N / 2] with a gate
    """As `pallas_kernels.finish_rows.finish_rows`."""
    _, rows, columns = product.shape
    width = columns // 2 if gate else columns
    by_row = rounding is not None and rounding.scale is None
    chunk = min(padded(width), CHUNK)
    like = functools.partial(result_like, product)
    return pl.pallas_call(
        functools.partial(_kernel, dtype=dtype, gate=gate, chunk=chunk),
        out_shape=result_of(rounding, like, (rows, width), dtype),
        grid=(rows, 1 if by_row else -(-width // chunk)),
        compiler_params=plt.CompilerParams(
            num_warps=min(max(chunk // WARP_COLUMNS, LEAST_WARPS), MOST_WARPS), num_stages=1
        ),
        interpret=interpreter.is_used_by_triton(interpret),
        name="finish_rows",
    )(product, rounding)

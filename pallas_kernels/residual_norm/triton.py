"""Residual stream and norm by Pallas' Triton backend: one kernel, each row read once.

A program has one row, which stays in its registers from the sum to the norm. XLA takes two kernels,
because the sum has a second use, and reads the row of one in the other; three where the product is
normed before it is added.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.linear.api import Norm
from pallas_kernels.paged_attention.triton.block import padded
from pallas_kernels.quantized_matmul import Rounding, Rows
from pallas_kernels.quantized_matmul.activations import result_of

NUM_WARPS = 8  # 16 numbers a thread in rows of 4096


class Operands(NamedTuple):
    """What the kernel reads; in it, references."""

    residual: Any  # [T, E]
    product: Any  # [S, T, E]
    weight: Any  # [E]
    of_product: Any  # [E]; None: the product is not normed
    rounding: Rounding | None  # with float32[1], if that is given


def _kernel(
    given: Operands,
    normed: Any,  # [T, E], or RoundedRows of references
    stream: Any,  # [T, E]
    *,
    norm: tuple[float, bool],
    behind: tuple[float, bool],
) -> None:
    row, (parts, _, columns) = pl.program_id(0), given.product.shape
    rounding, dtype = given.rounding, stream.dtype
    column = jnp.arange(padded(columns))
    inside = None if column.shape[0] == columns else column < columns

    def loaded(place: Any) -> jax.Array:
        other = None if inside is None else 0
        return plt.load(place, mask=inside, other=other).astype(jnp.float32)

    def rounded(values: jax.Array) -> jax.Array:
        return values.astype(dtype).astype(jnp.float32)

    def norm_of(values: jax.Array, weight: Any, eps: float, offset: bool) -> jax.Array:
        over = values * lax.rsqrt((values * values).sum() / columns + eps)
        factor = loaded(weight.at[column])
        return rounded(over * (1.0 + factor) if offset else rounded(over) * factor)

    total = loaded(given.product.at[0, row, column])
    for part in range(1, parts):
        total += loaded(given.product.at[part, row, column])
    total = rounded(total)
    if given.of_product is not None:
        total = norm_of(total, given.of_product, *behind)
    summed = rounded(loaded(given.residual.at[row, column]) + total)
    plt.store(stream.at[row, column], summed.astype(dtype), mask=inside)
    scaled = norm_of(summed, given.weight, *norm)
    if rounding is None:
        plt.store(normed.at[row, column], scaled.astype(dtype), mask=inside)
        return
    if rounding.scale is None:
        factor, scale = rounding.stretch(jnp.abs(scaled).max())
    else:
        scale = rounding.scale[0]
        factor = 1.0 / scale
    plt.store(normed.values.at[row, column], rounding.cut(scaled * factor), mask=inside)
    plt.store(normed.scale.at[row], scale)


def residual_norm(
    residual: jax.Array,  # [T, E]
    product: jax.Array,  # [S, T, E]
    norm: Norm,
    *,
    behind: Norm | None,
    rounding: Rounding | None,
    interpret: bool | None = None,
) -> tuple[Rows, jax.Array]:  # [T, E], [T, E]
    """As `pallas_kernels.residual_norm.residual_norm`."""
    of_product = None if behind is None else behind.weight
    return _call(
        Operands(residual, product, norm.weight, of_product, rounding),
        norm=(norm.eps, norm.offset),
        behind=(0.0, False) if behind is None else (behind.eps, behind.offset),
        interpret=interpreter.is_used_by_triton(interpret),
    )


@functools.partial(
    jax.jit, static_argnames=("norm", "behind", "interpret")
)  # the layers share one trace
def _call(
    operands: Operands, *, norm: tuple[float, bool], behind: tuple[float, bool], interpret: bool
) -> tuple[Rows, jax.Array]:
    residual = operands.residual
    like = functools.partial(result_like, residual)
    shape, dtype = residual.shape, residual.dtype
    normed, stream = pl.pallas_call(
        functools.partial(_kernel, norm=norm, behind=behind),
        out_shape=(result_of(operands.rounding, like, shape, dtype), like(shape, dtype)),
        grid=(residual.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="residual_norm",
    )(operands)
    return normed, stream

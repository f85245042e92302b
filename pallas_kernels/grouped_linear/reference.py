"""Grouped linear layers as plainly as can be: every row times its own copy of its weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_linear.layer import Layer
from pallas_kernels.linear.xla import linear


def grouped_linear(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0])
    group = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), len(sizes) - 1)

    def one(row: jax.Array, index: jax.Array) -> jax.Array:
        return layer.product(linear, row[None], index)[0]

    return jnp.where(rows[:, None] < ends[-1], jax.vmap(one)(x, group), 0)

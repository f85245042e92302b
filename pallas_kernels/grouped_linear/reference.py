"""Grouped linear layers as plainly as can be: every row times its own copy of its weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_linear.weights import of_group
from pallas_kernels.linear.api import Weight
from pallas_kernels.linear.xla import linear


def grouped_linear(
    x: jax.Array,  # [M, K]
    weight: Weight,  # [E, N, K]
    sizes: jax.Array,  # int32[E]
    *,
    scale: jax.Array | None,  # float32[E, N]
    activations: str,
    gated: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0])
    group = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), len(sizes) - 1)

    def one(row: jax.Array, index: jax.Array) -> jax.Array:
        return linear(
            row[None],
            of_group(weight, index),
            scale=None if scale is None else scale[index],
            activations=activations,
            bias=None,
            norm=None,
            residual=None,
            gated=gated,
            out_dtype=out_dtype,
        )[0]

    return jnp.where(rows[:, None] < ends[-1], jax.vmap(one)(x, group), 0)

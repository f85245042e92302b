"""The kept tokens by sorting each row: the definition, slow and plain."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kept_threshold(
    weights: jax.Array,  # float32[R, V]
    top_k: jax.Array,  # int32[R]
    top_p: jax.Array,  # float32[R]
    min_p: jax.Array,  # float32[R]
) -> jax.Array:  # float32[R]
    """The bounds of `pallas_kernels.kept_threshold`; sums are float32."""
    descending = -jnp.sort(-weights, axis=-1)
    last = weights.shape[1] - 1

    def of(place: jax.Array) -> jax.Array:
        return jnp.take_along_axis(descending, jnp.clip(place, 0, last)[:, None], axis=-1)[:, 0]

    floor = jnp.maximum(min_p, jnp.where(top_k > 0, of(top_k - 1), 0.0))
    floor = jnp.where(top_k > last, min_p, floor)
    mass = jnp.cumsum(jnp.where(descending >= floor[:, None], descending, 0.0), axis=-1)
    reached = mass >= top_p[:, None] * mass[:, -1:]
    border = jnp.where(top_p < 1.0, of(jnp.argmax(reached, axis=-1)), 0.0)
    return jnp.maximum(floor, border)

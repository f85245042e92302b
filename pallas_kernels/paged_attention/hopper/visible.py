"""The pages that a Hopper kernel may read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def visible_range(
    first_key: jax.Array, length: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The first and the last run of so many tokens that hold visible keys, int32[] each.

    Outside of them may be any request's pages: a copy of more keys than are visible reads the
    nearest of these twice.
    """
    size = jnp.int32(tokens)
    lowest = lax.div(first_key, size)
    return lowest, jnp.maximum(lax.div(length + (tokens - 1), size) - 1, 0)

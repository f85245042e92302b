"""Writing new keys and values into the pages, one token after the other: the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def write(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    rows: jax.Array,  # [T, 2, KVH, D], in the pool's own element type
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """A loop of single-row updates; of two tokens with one place the later wins."""

    def one(token: jax.Array, pool: jax.Array) -> jax.Array:
        origin = (page_ids[token], offsets[token], jnp.int32(0), jnp.int32(0), jnp.int32(0))
        return lax.dynamic_update_slice(pool, rows[token][None, None], origin)

    return lax.fori_loop(0, rows.shape[0], one, kv_pages)

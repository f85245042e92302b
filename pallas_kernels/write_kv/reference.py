"""Writing new keys and values into the pages, one token after the other: the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pages import as_values, quantized


def requantized(
    held: jax.Array,  # [..., page_size, 2, KVH, D], int8 or e4m3
    old: jax.Array,  # float32[..., 2, KVH]
    new: jax.Array,  # float32[..., 2, KVH]
) -> jax.Array:  # [..., page_size, 2, KVH, D]
    """Pages at their old scales as pages at new ones.

    Not a bit changes where the scale stays, or where a page begins anew (old scale 0).
    """
    scales = (scale[..., None, :, :, None] for scale in (old, new))
    before, after = scales
    values = quantized(as_values(held).astype(jnp.float32) * before, after, held.dtype)
    return jnp.where((before > 0.0) & (after > before), values, held)


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


def rescale(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D], int8 or e4m3
    old: jax.Array,  # float32[NP, 2, KVH]
    new: jax.Array,  # float32[NP, 2, KVH], at least old
    page_ids: jax.Array,  # int32[T]
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """What the pages hold at their old scales, rounded to the new ones: the whole pool."""
    return requantized(kv_pages, old, new)

"""Writing new keys and values into the pages with one XLA scatter, in place under donation."""

from __future__ import annotations

import jax


def write(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    rows: jax.Array,  # [T, 2, KVH, D], in the pool's own element type
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """Scatters contiguous rows of 2 * KVH * D elements.

    A bfloat16 or e4m3 pool costs a copy of the whole pool on the CPU of some JAX versions; there it
    is stored as its bits (`pallas_kernels.storage_dtype`).
    """
    return kv_pages.at[page_ids, offsets].set(rows, mode="promise_in_bounds")

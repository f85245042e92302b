"""Writing new keys and values into the pages with one XLA scatter, in place under donation."""

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
    """Scatters contiguous rows; 16-bit floats travel as bits.

    XLA:CPU has no 16-bit float scatter of its own: it would convert the whole pool to float32 and
    back. As unsigned integers the same bytes are moved and nothing is converted.
    """
    if kv_pages.dtype in (jnp.bfloat16, jnp.float16):
        bits = lax.bitcast_convert_type(kv_pages, jnp.uint16)
        moved = write(bits, lax.bitcast_convert_type(rows, jnp.uint16), page_ids, offsets)
        return lax.bitcast_convert_type(moved, kv_pages.dtype)
    return kv_pages.at[page_ids, offsets].set(rows, mode="promise_in_bounds")

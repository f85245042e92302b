"""Writing new keys and values by whole pages, in place in whatever order a page lies in memory.

For 8-bit pages on a TPU whose tokens share 32-bit words: there XLA scatters single tokens by
bringing the whole pool into another order and back, and a DMA cannot write part of a word.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.write_kv.xla import rescale

__all__ = ["rescale", "write"]

PAGES = 256  # a step: those of a decode batch, or of a chunk of 4,096 tokens in pages of 16


def write(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    rows: jax.Array,  # [T, 2, KVH, D], in the pool's own element type
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """Reads each page that a token falls into, changes it and writes it back, `PAGES` at a time."""
    tokens = page_ids.shape[0]
    step = min(PAGES, tokens)
    first = jnp.argmax(page_ids[:, None] == page_ids, axis=1)  # token of the same page
    begins = first == jnp.arange(tokens)
    rank = (jnp.cumsum(begins) - 1)[first]  # of the token's page among the distinct ones
    missing = kv_pages.shape[0]  # read as the last page, and not written
    distinct = jnp.full(-(-tokens // step) * step, missing, jnp.int32).at[rank].set(page_ids)

    def write_some(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pool, done = state
        ids = lax.dynamic_slice_in_dim(distinct, done, step)
        held = pool.at[ids].get(mode="clip")
        place = jnp.where(rank >= done, rank - done, step)  # those from `step` on are dropped
        held = held.at[place, offsets].set(rows, mode="drop")
        return pool.at[ids].set(held, mode="drop"), done + step

    return lax.while_loop(
        lambda state: state[1] < begins.sum(), write_some, (kv_pages, jnp.int32(0))
    )[0]

"""Writing new keys and values into the pages with one XLA scatter, in place under donation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.write_kv.reference import requantized

RESCALED_PAGES = 32  # pages a step: as many as a decode batch usually rescales at once


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


def rescale(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D], int8 or e4m3
    old: jax.Array,  # float32[NP, 2, KVH]
    new: jax.Array,  # float32[NP, 2, KVH], at least old
    page_ids: jax.Array,  # int32[T]
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """What the written pages hold at their old scales, rounded to the new ones.

    A loop over the pages whose scale has grown, each once: a page is usually near its final scale
    after its first tokens, so a step has few of them or none.
    """
    tokens = jnp.arange(page_ids.shape[0])
    first = jnp.full(kv_pages.shape[0], page_ids.shape[0]).at[page_ids].min(tokens)
    held_before = (old[page_ids] > 0.0).any(axis=(1, 2))
    grown = (new[page_ids] > old[page_ids]).any(axis=(1, 2)) & held_before
    chosen = (first[page_ids] == tokens) & grown
    step = min(RESCALED_PAGES, page_ids.shape[0])
    places = jnp.nonzero(chosen, size=page_ids.shape[0], fill_value=page_ids.shape[0])[0]
    # places beyond the chosen ones name a page outside the pool, which is dropped
    padding = jnp.full(step, page_ids.shape[0])
    listed = jnp.append(page_ids, kv_pages.shape[0])[jnp.append(places, padding)]

    def one_step(index: jax.Array, pool: jax.Array) -> jax.Array:
        ids = lax.dynamic_slice_in_dim(listed, index * step, step)
        held = pool.at[ids].get(mode="clip")
        scales = (scale.at[ids].get(mode="clip") for scale in (old, new))
        return pool.at[ids].set(requantized(held, *scales), mode="drop")

    steps = (jnp.sum(chosen) + step - 1) // step
    return lax.fori_loop(0, steps, one_step, kv_pages)

"""Writing new keys and values, or their scales, by whole pages, in place.

For what XLA on a TPU scatters by token only by bringing the whole array into another order and
back: 8-bit pages with tokens that share 32-bit words (a DMA cannot write a part), and scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pages import as_stored

PAGES = 256  # a step: those of a decode batch, or of a chunk of 4,096 tokens in pages of 16


def write(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    rows: jax.Array,  # [T, 2, KVH, D], in the pool's own element type
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """The pool with tokens written."""

    def change(held: tuple[jax.Array], place: jax.Array) -> tuple[jax.Array]:
        return (held[0].at[place, offsets].set(rows, mode="drop"),)

    return _by_pages((kv_pages,), page_ids, change)[0]


def write_scales(
    k_scale: jax.Array,  # bfloat16, or its bits, [NP, KVH, page_size]
    v_scale: jax.Array,
    k_rows: jax.Array,  # bfloat16[T, KVH]
    v_rows: jax.Array,
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:
    """The scales of keys and values with those of tokens written.

    A page is a row of KVH * page_size numbers here, as `scales_of_pages` reads it.
    """
    whole = k_scale.shape
    new = [as_stored(rows, k_scale.dtype) for rows in (k_rows, v_rows)]

    def change(held: tuple[jax.Array, ...], place: jax.Array) -> tuple[jax.Array, ...]:
        by_head = [of_pages.reshape(-1, *whole[1:]) for of_pages in held]
        changed = [
            of_pages.at[place, :, offsets].set(rows, mode="drop")
            for of_pages, rows in zip(by_head, new, strict=True)
        ]
        return tuple(of_pages.reshape(of_pages.shape[0], -1) for of_pages in changed)

    flat = tuple(scale.reshape(whole[0], -1) for scale in (k_scale, v_scale))
    k_scale, v_scale = (scale.reshape(whole) for scale in _by_pages(flat, page_ids, change))
    return k_scale, v_scale


def _by_pages(
    arrays: Any,  # a tuple, of pages each, the first axis
    page_ids: jax.Array,  # int32[T]
    change: Callable[[Any, jax.Array], Any],
) -> Any:
    """Reads each page that a token falls into, changes it and writes it back, `PAGES` at a time.

    `change` takes some pages of each array, and the place of each token's page among them; that of
    a token without a page is behind the last.
    """
    tokens = page_ids.shape[0]
    step = min(PAGES, tokens)
    first = jnp.argmax(page_ids[:, None] == page_ids, axis=1)  # token of the same page
    begins = first == jnp.arange(tokens)
    rank = (jnp.cumsum(begins) - 1)[first]  # of the token's page among the distinct ones
    missing = arrays[0].shape[0]  # read as the last page, and not written
    distinct = jnp.full(-(-tokens // step) * step, missing, jnp.int32).at[rank].set(page_ids)

    def write_some(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        arrays, done = state
        ids = lax.dynamic_slice_in_dim(distinct, done, step)
        held = jax.tree.map(lambda array: array.at[ids].get(mode="clip"), arrays)
        place = jnp.where(rank >= done, rank - done, step)  # those from `step` on are dropped
        changed = change(held, place)
        put = jax.tree.map(lambda array, new: array.at[ids].set(new, mode="drop"), arrays, changed)
        return put, done + step

    return lax.while_loop(
        lambda state: state[1] < begins.sum(), write_some, (arrays, jnp.int32(0))
    )[0]

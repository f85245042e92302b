"""Paged prefill attention in plain XLA: a loop over (lane, tile of query rows) work items.

The number of items and the pages that each one reads are known only at run time, so the cost
follows the live tokens and their contexts, not the size of the region or of the page table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.lanes import PrefillLanes, divide
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.softmax import MASKED
from pallas_kernels.paged_attention.xla.decode import (
    block_pages,
    capped,
    dot_precision,
    normalised,
    pad_pages,
)
from pallas_kernels.pages import compute_dtype, gather_pages, read_page, token_scales

TILE_ROWS = 64  # query rows an item; larger is faster for long prompts, slower for many short ones
BLOCK_TOKENS = 64  # keys a step of the inner loop


@jax.jit
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D], or [..., KVH * n, D / n]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    options: AttentionOptions,
) -> jax.Array:  # [C, H, D]
    """Causal attention of packed chunks over pages that already hold the chunks themselves.

    Of a head that is several rows only the pages that are read become whole heads.

    Queries and softmax weights are rounded to the type of the pages (with 8-bit pages: of the
    query) before they are multiplied; scores, maxima, sums and the accumulated output are float32.
    """
    scale, soft_cap, window = options.scores
    sinks, k_scale, v_scale = options.sinks, options.k_scale, options.v_scale
    region, heads, head_dim = q.shape
    page_size, _, rows_of_token, width = kv_pages.shape[1:]
    kv_heads = rows_of_token * width // head_dim
    group = heads // kv_heads
    dtype = compute_dtype(kv_pages.dtype, q.dtype)
    pages = block_pages(page_size, BLOCK_TOKENS)
    tokens = pages * page_size
    table = pad_pages(page_table, pages) + options.first_page
    tile = min(TILE_ROWS, region)
    # rows past the end let the last tile of the region start anywhere
    packed = jnp.pad(q.astype(dtype), ((0, tile), (0, 0), (0, 0)))
    last_seen = options.last_seen
    if last_seen is not None:
        last_seen = jnp.pad(last_seen, (0, tile))
    tiles = divide(lanes, region, tile)
    row_sinks = None
    if sinks is not None:
        row_sinks = jnp.tile(sinks.reshape(kv_heads, group), (1, tile))  # [KVH, tile * group]

    def filled(shape: tuple[int, ...], value: float) -> jax.Array:
        # full_like keeps the manual axes of q, which a loop under shard_map asks of its carry
        return lax.full_like(q, value, dtype=jnp.float32, shape=shape)

    def attend(item: jax.Array, out: jax.Array) -> jax.Array:
        lane, first_row, rows, first_position = (facts[item] for facts in tiles)
        row_position = first_position + jnp.arange(tile)
        row_pages = table[lane]
        row_last, keys = row_position, first_position + rows  # what each row, and the tile, sees
        if last_seen is not None:
            row_last = lax.dynamic_slice_in_dim(last_seen, first_row, tile)
            keys = 1 + jnp.max(jnp.where(jnp.arange(tile) < rows, row_last, -1))
        first_key = jnp.zeros_like(keys)
        if window is not None:
            first_key = jnp.maximum(first_position + 1 - window, 0)

        query = lax.dynamic_slice_in_dim(packed, first_row, tile)
        query = query.reshape(tile, kv_heads, group, head_dim).transpose(1, 0, 2, 3)
        query = query.reshape(kv_heads, tile * group, head_dim)
        position, last = (jnp.repeat(x, group)[:, None] for x in (row_position, row_last))

        def factor(scales: jax.Array | None, ids: jax.Array) -> jax.Array | float:
            """The scale of stored numbers; broadcasts against [KVH, rows, tokens]."""
            of_tokens = token_scales(scales, ids)  # [KVH, tokens]
            if of_tokens is None:
                return 1.0
            return of_tokens if of_tokens.ndim == 0 else of_tokens[:, None]

        def step(
            block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            highest, total, acc = carry
            ids = lax.dynamic_slice_in_dim(row_pages, block * pages, pages)
            read = read_page(kv_pages, ids[0]) if pages == 1 else gather_pages(kv_pages, ids)
            held = read.astype(dtype).reshape(tokens, 2, kv_heads, head_dim)
            key = block * tokens + jnp.arange(tokens)
            visible = key <= last  # [tile * group, tokens]
            if window is not None:
                visible &= position - key < window
            # keys that no row of the tile sees may hold anything, NaN too, and 0 * NaN is NaN
            reached = (key >= first_key) & (key < keys)
            values = jnp.where(reached[:, None, None], held[:, 1], 0)
            scores = jnp.einsum(
                "krd,tkd->krt",
                query,
                held[:, 0],
                preferred_element_type=jnp.float32,
                precision=dot_precision(dtype),
            )
            scores = capped(scores * factor(k_scale, ids) * scale, soft_cap)
            scores = jnp.where(visible, scores, MASKED)
            # before its first visible key a row has the maximum MASKED and weights of 1: what they
            # add is multiplied by exp(MASKED - maximum) = 0 later
            rising = jnp.maximum(highest, scores.max(axis=-1))
            decay = jnp.exp(highest - rising)
            weights = jnp.exp(scores - rising[..., None])
            scaled = weights
            if v_scale is not None:
                # the scale of a token that is not reached may be anything, NaN too
                scaled = jnp.where(reached, weights * factor(v_scale, ids), 0.0)
            added = jnp.einsum(
                "krt,tkd->krd",
                scaled.astype(dtype),
                values,
                preferred_element_type=jnp.float32,
                precision=dot_precision(dtype),
            )
            return rising, total * decay + weights.sum(axis=-1), acc * decay[..., None] + added

        shape = (kv_heads, tile * group)
        carry = (filled(shape, MASKED), filled(shape, 0.0), filled((*shape, head_dim), 0.0))
        end = (keys + tokens - 1) // tokens
        highest, total, acc = lax.fori_loop(first_key // tokens, end, step, carry)
        acc = normalised(acc, highest, total, row_sinks)
        acc = acc.reshape(kv_heads, tile, group, head_dim).transpose(1, 0, 2, 3)
        acc = acc.reshape(tile, heads, head_dim).astype(out.dtype)
        # a tile may reach into the rows of the lane behind it: those keep what they have
        before = lax.dynamic_slice_in_dim(out, first_row, tile)
        kept = jnp.where((jnp.arange(tile) < rows)[:, None, None], acc, before)
        return lax.dynamic_update_slice_in_dim(out, kept, first_row, axis=0)

    empty = lax.full_like(q, 0, shape=(region + tile, heads, head_dim))
    return lax.fori_loop(0, jnp.sum(tiles.rows > 0), attend, empty)[:region]

"""Paged decode attention in plain XLA: one loop over blocks of pages for all rows together.

A row is ONE matrix product per block: with a block-diagonal query [H, KVH * D] a page is read in
its stored order, [tokens, KVH * D], without a transpose. That costs KVH times the multiplications
and is the fastest form on XLA:CPU for bfloat16: its matrix unit is far ahead of the memory; in
float32 the plain grouped product is as fast or faster. Several queries a row are further heads of
their KV head, each with a mask of its own: a page is read once for all. Online softmax: Milakov and
Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.queries import (
    as_heads,
    as_queries,
    for_heads,
    key_range,
    query_ends,
)
from pallas_kernels.paged_attention.softmax import MASKED
from pallas_kernels.pages import compute_dtype, gather_pages, token_scales


def block_pages(page_size: int, tokens: int) -> int:
    """The number of pages that one step of a loop over `tokens` tokens reads."""
    return max(1, tokens // page_size)


def pad_pages(page_table: jax.Array, multiple: int) -> jax.Array:
    """The page table with columns of page 0 added, so that a block never reads past its end."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % multiple)))


def dot_precision(dtype: jnp.dtype) -> lax.Precision:
    """float32 operands are multiplied in float32; narrower ones in the unit's own precision."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def like(mask: jax.Array, ndim: int, *, after: bool = False) -> jax.Array:
    """[B, tokens] with axes of size 1 added: [B, 1, .., tokens], or [B, tokens, 1, ..]."""
    ones = (1,) * (ndim - 2)
    batch, tokens = mask.shape
    return mask.reshape((batch, tokens, *ones) if after else (batch, *ones, tokens))


def capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Scores kept below a bound in magnitude by tanh, where there is one."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def normalised(
    out: jax.Array,  # float32[..., D], sum of exp(score - highest) * value
    highest: jax.Array,  # float32[...]
    total: jax.Array,  # float32[...], sum of exp(score - highest)
    sinks: jax.Array | None,  # float32, broadcasts against highest
) -> jax.Array:  # float32[..., D]
    """The weighted mean that an online softmax ends with; a sink adds to the sum alone."""
    if sinks is not None:
        risen = jnp.maximum(highest, sinks)
        decay = jnp.exp(highest - risen)
        out = out * decay[..., None]
        total = total * decay + jnp.exp(sinks - risen)
    return out / jnp.where(total > 0.0, total, 1.0)[..., None]


@jax.jit
def decode(
    q: jax.Array,  # [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
) -> jax.Array:  # [B, Q, H, D]
    """Attention of up to Q queries a slot; the cost follows the longest live context.

    Queries and softmax weights are rounded to the type of the pages (with 8-bit pages: of the
    query) before they are multiplied; scores, maxima, sums and the accumulated output are float32.
    """
    scale, soft_cap, window = options.scores
    sinks, k_scale, v_scale = options.sinks, options.k_scale, options.v_scale
    batch, queries, _, head_dim = q.shape
    page_size, _, kv_heads, _ = kv_pages.shape[1:]
    q_group = q.shape[2] // kv_heads
    q = as_heads(q, kv_heads)
    heads, group = q.shape[1], queries * q_group
    dtype = compute_dtype(kv_pages.dtype, q.dtype)
    diagonal = dtype == jnp.bfloat16
    # float32 blocks are twice as large and leave the cache sooner
    pages = block_pages(page_size, 64 if dtype == jnp.float32 else 128)
    tokens = pages * page_size
    table = pad_pages(page_table, pages) + options.first_page

    query = q.astype(dtype)
    if diagonal:
        own = jnp.repeat(jnp.eye(kv_heads, dtype=dtype), group, axis=0)[:, :, None]  # [H, KVH, 1]
        query = (query[:, :, None, :] * own).reshape(batch, heads, kv_heads * head_dim)
        score, weigh = "bhc,btc->bht", "bht,btc->bhc"
    else:
        query = query.reshape(batch, kv_heads, group, head_dim)
        score, weigh = "bkgd,btkd->bkgt", "bkgt,btkd->bkgd"
    held_shape = (batch, tokens, 2, *(query.shape[2:] if diagonal else (kv_heads, head_dim)))

    first_key, end_key = key_range(kv_lens, options.query_lens, queries, window)
    live = end_key > 0
    # an idle row must not pull the loop's start down to zero
    lowest = jnp.min(jnp.where(live, first_key, jnp.iinfo(jnp.int32).max))
    begin = lowest // tokens
    end = (jnp.max(end_key) + tokens - 1) // tokens
    ends = query_ends(kv_lens, options.query_lens, queries)

    def factor(scales: jax.Array | None, ids: jax.Array) -> jax.Array | float:
        """The scale of stored numbers; broadcasts against the scores."""
        of_tokens = token_scales(scales, ids)  # [B, KVH, tokens]
        if of_tokens is None:
            return 1.0
        if of_tokens.ndim == 0:
            return of_tokens
        return jnp.repeat(of_tokens, group, axis=1) if diagonal else of_tokens[:, :, None]

    def of_scores(key: jax.Array, visible: jax.Array) -> jax.Array:
        """The keys of a block that each query sees; broadcasts against the scores."""
        if queries == 1:
            return like(visible, query.ndim)
        seen = key < ends[..., None]  # [B, Q, tokens]
        if window is not None:
            seen &= key >= ends[..., None] - window
        return for_heads(seen, kv_heads, q_group).reshape(*query.shape[:-1], tokens)

    def step(
        block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, out = carry
        ids = lax.dynamic_slice_in_dim(table, block * pages, pages, axis=1)
        held = gather_pages(kv_pages, ids).astype(dtype).reshape(held_shape)
        key = block * tokens + jnp.arange(tokens)
        visible = (key < end_key[:, None]) & (key >= first_key[:, None])  # [B, tokens]
        # a masked token may hold anything, NaN too, and 0 * NaN is NaN
        values = jnp.where(like(visible, held.ndim - 1, after=True), held[:, :, 1], 0)
        scores = jnp.einsum(
            score,
            query,
            held[:, :, 0],
            preferred_element_type=jnp.float32,
            precision=dot_precision(dtype),
        )
        scores = capped(scores * factor(k_scale, ids) * scale, soft_cap)
        seen = of_scores(key, visible)
        scores = jnp.where(seen, scores, MASKED)
        # before its first visible token a row has the maximum MASKED and weights of 1, which
        # only meet zero values here and are multiplied by exp(MASKED - maximum) = 0 later
        rising = jnp.maximum(highest, scores.max(axis=-1))
        decay = jnp.exp(highest - rising)
        weights = jnp.exp(scores - rising[..., None])
        if queries > 1:
            # but a query that sees nothing stays at the maximum MASKED, beside others that do see
            weights = jnp.where(seen, weights, 0.0)
        scaled = weights
        if v_scale is not None:
            # the scale of a token that is not visible may be anything, NaN too
            scaled = jnp.where(seen, weights * factor(v_scale, ids), 0.0)
        added = jnp.einsum(
            weigh,
            scaled.astype(dtype),
            values,
            preferred_element_type=jnp.float32,
            precision=dot_precision(dtype),
        )
        return rising, total * decay + weights.sum(axis=-1), out * decay[..., None] + added

    def filled(shape: tuple[int, ...], value: float) -> jax.Array:
        # full_like keeps the manual axes of q, which a loop under shard_map asks of its carry
        return lax.full_like(q, value, dtype=jnp.float32, shape=shape)

    shape = query.shape[:-1]
    carry = (filled(shape, MASKED), filled(shape, 0.0), filled(query.shape, 0.0))
    highest, total, out = lax.fori_loop(begin, end, step, carry)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.reshape(kv_heads, 1, q_group), (kv_heads, queries, q_group))
        sinks = sinks.reshape(shape[1:])
    out = normalised(out, highest, total, sinks)
    if diagonal:
        # what a head computed with the other heads' values is dropped, not multiplied by zero
        out = out.reshape(batch, kv_heads, group, kv_heads, head_dim)
        out = jnp.stack([out[:, h, :, h] for h in range(kv_heads)], axis=1)
    return as_queries(out.reshape(q.shape).astype(q.dtype), queries, kv_heads)

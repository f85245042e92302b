"""Attention over the page table in plain JAX, float32, one row at a time: the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.lanes import PrefillLanes
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.queries import query_ends
from pallas_kernels.pages import as_values, token_scales


@jax.jit
def decode(
    q: jax.Array,  # [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
) -> jax.Array:  # [B, Q, H, D]
    """Softmax attention of every query over its own tokens, gathered one by one, in float32."""
    queries = q.shape[1]
    ends = query_ends(kv_lens, options.query_lens, queries).reshape(-1)
    rows, table = q.reshape(-1, *q.shape[2:]), jnp.repeat(page_table, queries, axis=0)
    return _decode_rows(rows, kv_pages, table, ends, options).reshape(q.shape)


def _decode_rows(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    positions: jax.Array | None = None,  # int32[B]; None: of the last tokens
) -> jax.Array:  # [B, H, D]
    scale, soft_cap, window = options.scores
    sinks, first_page = options.sinks, options.first_page
    page_size, _, kv_heads, head_dim = kv_pages.shape[1:]
    heads = q.shape[1]
    tokens = jnp.arange(page_table.shape[1] * page_size)
    positions = kv_lens - 1 if positions is None else positions

    def one_row(operands: tuple[jax.Array, ...]) -> jax.Array:
        query, pages, length, position = operands
        page = first_page + pages[tokens // page_size]
        held = as_values(kv_pages.at[page, tokens % page_size].get(mode="clip"))
        held = held.astype(jnp.float32)  # [tokens, 2, KVH, D]
        for part, factor in enumerate((options.k_scale, options.v_scale)):
            of_tokens = token_scales(factor, first_page + pages)  # [KVH, tokens]
            if of_tokens is not None:
                held = held.at[:, part].multiply(jnp.expand_dims(of_tokens.T, -1))
        visible = tokens < length
        if window is not None:
            visible &= position - tokens < window
        # a masked token may hold anything, NaN too, and 0 * NaN is NaN
        held = jnp.where(visible[:, None, None, None], held, 0.0)
        query = query.astype(jnp.float32).reshape(kv_heads, heads // kv_heads, head_dim)
        scores = scale * jnp.einsum(
            "kgd,tkd->kgt", query, held[:, 0], precision=lax.Precision.HIGHEST
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        if sinks is not None:
            highest = jnp.maximum(highest, sinks.reshape(kv_heads, -1, 1))
        highest = jnp.where(length > 0, highest, 0.0)
        weights = jnp.where(visible, jnp.exp(scores - highest), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sinks.reshape(kv_heads, -1, 1) - highest)
        weights = weights / jnp.where(total > 0.0, total, 1.0)
        out = jnp.einsum("kgt,tkd->kgd", weights, held[:, 1], precision=lax.Precision.HIGHEST)
        return out.reshape(heads, head_dim)

    return lax.map(one_row, (q, page_table, kv_lens, positions)).astype(q.dtype)


@jax.jit
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    options: AttentionOptions,
) -> jax.Array:  # [C, H, D]
    """Every row of the region is a decode row of its lane, which sees the tokens up to its last."""
    rows = jnp.arange(q.shape[0])[:, None]
    owned = (rows >= lanes.start) & (rows < lanes.start + lanes.length)  # [C, N]
    lane = jnp.argmax(owned, axis=1)
    position = lanes.context[lane] + rows[:, 0] - lanes.start[lane]
    last = position if options.last_seen is None else options.last_seen
    seen = jnp.where(owned.any(axis=1), last + 1, 0)
    return _decode_rows(q, kv_pages, page_table[lane], seen, options, position)

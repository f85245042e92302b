"""The query positions of a decode row: which keys each sees, and queries as further heads.

A row has up to Q queries, its last tokens: query i of n is token kv_len - n + i and sees the keys
up to itself, as in prefill. All read the same keys, so to a backend they are further heads of
their KV head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_QUERIES = 8


def query_ends(
    kv_lens: jax.Array,  # int32[B]
    query_lens: jax.Array | None,  # int32[B]
    queries: int,
) -> jax.Array:  # int32[B, Q]
    """The end of the keys that each query sees; 0 for one that does not exist or sees nothing."""
    if query_lens is None:
        query_lens = jnp.full_like(kv_lens, queries)
    query = jnp.arange(queries, dtype=jnp.int32)
    ends = (kv_lens - query_lens)[:, None] + query + 1
    return jnp.where(query < query_lens[:, None], jnp.maximum(ends, 0), 0)


def key_range(
    kv_lens: jax.Array,  # int32[B]
    query_lens: jax.Array | None,  # int32[B]
    queries: int,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:  # int32[B], int32[B]
    """First and end of the keys that any query of a row sees; an end of 0 for none."""
    first_end, high = kv_lens, kv_lens
    if queries > 1:
        count = jnp.int32(queries) if query_lens is None else query_lens
        first_end = kv_lens - count + 1
        high = jnp.where(count > 0, kv_lens, 0)
    low = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(first_end - window, 0)
    return low, high


def as_heads(q: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [B, Q, H, D] as heads [B, Q * H, D]: those of a KV head lie side by side.

    A KV head has Q * group of them, the group of query 0 first.
    """
    batch, queries, heads, head_dim = q.shape
    parts = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    return parts.swapaxes(1, 2).reshape(batch, queries * heads, head_dim)


def as_queries(out: jax.Array, queries: int, kv_heads: int) -> jax.Array:
    """Back from the heads [B, Q * H, D] of `as_heads` to [B, Q, H, D]."""
    batch, rows, head_dim = out.shape
    group = rows // (queries * kv_heads)
    parts = out.reshape(batch, kv_heads, queries, group, head_dim)
    return parts.swapaxes(1, 2).reshape(batch, queries, kv_heads * group, head_dim)


def for_heads(
    values: jax.Array,  # [B, Q, ...], of each query
    kv_heads: int,
    group: int,
) -> jax.Array:  # [B, Q * H, ...]
    """Values by query, repeated for each head of `as_heads`."""
    batch, queries, *rest = values.shape
    parts = values.reshape(batch, 1, queries, 1, *rest)
    parts = jnp.broadcast_to(parts, (batch, kv_heads, queries, group, *rest))
    return parts.reshape(batch, kv_heads * queries * group, *rest)

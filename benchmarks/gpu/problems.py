"""Random paged attention problems, made on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Shape(NamedTuple):
    """Static sizes of a decode problem."""

    slots: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None

    @property
    def pages(self) -> int:
        """Columns of the page table."""
        return -(-self.context // self.page_size)


class Problem(NamedTuple):
    """Operands of paged_decode_attention."""

    q: jax.Array  # [B, H, D]
    kv_pages: jax.Array  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array  # int32[B, P]
    kv_lens: jax.Array  # int32[B]


def page_tables(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """int32[B, P]: page ids in random order, none of them 0."""
    ids = 1 + rng.permutation(shape.slots * shape.pages)
    return ids.reshape(shape.slots, shape.pages).astype(np.int32)


def ragged(shape: Shape, seed: int) -> Problem:
    """Boundary and random lengths; every place that no slot may see holds NaN."""
    rng = np.random.default_rng(seed)
    page, longest = shape.page_size, shape.context
    lengths = rng.integers(0, longest + 1, shape.slots)
    edges = [longest, 0, 1, page - 1, page, page + 1, longest - 1]
    count = min(shape.slots, len(edges))
    lengths[:count] = edges[:count]
    table = page_tables(rng, shape)
    if shape.slots > 7:
        table[7] = table[0]  # two slots that share every page
        lengths[7] = longest // 2
    total = shape.slots * shape.pages + 1
    key_q, key_pool = jax.random.split(jax.random.key(seed))

    @jax.jit
    def build(page_table: jax.Array, kv_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jnp.arange(shape.pages * page)
        live = token < kv_lens[:, None]  # [B, tokens]
        ids = jnp.where(live, page_table[:, token // page], total)  # the others are dropped
        seen = jnp.zeros((total, page), bool).at[ids, token % page].set(True, mode="drop")
        pool = jax.random.normal(
            key_pool, (total, page, 2, shape.kv_heads, shape.head_dim), shape.dtype
        )
        q = jax.random.normal(key_q, (shape.slots, shape.heads, shape.head_dim), shape.dtype)
        return q, jnp.where(seen[:, :, None, None, None], pool, jnp.nan)

    page_table = jnp.asarray(table)
    kv_lens = jnp.asarray(lengths, jnp.int32)
    q, pool = build(page_table, kv_lens)
    return Problem(q, pool, page_table, kv_lens)

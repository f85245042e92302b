"""The columns of a block of keys of all heads: which token a row of the query sees in each, the
products of all heads with the block, and the scales of 8-bit pages as factors of columns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pages import scales_of_pages
from pallas_kernels.tpu_pages import LANES, PageView

NEVER = np.iinfo(np.int32).max  # the token of a column that no row may see


def times_columns(matrix: jax.Array, factors: jax.Array) -> jax.Array:
    """A matrix [H, columns] times factors [columns / 128, 128]."""
    parts = [
        matrix[:, LANES * chunk : LANES * (chunk + 1)] * factors[chunk][None]
        for chunk in range(factors.shape[0])
    ]
    return jnp.concatenate(parts, axis=1)


def column_tokens(view: PageView, pages: int, heads: int, rows: int) -> np.ndarray:
    """int32[rows, columns]: the token of the block that a head sees there, or NEVER."""
    token, head, part = view.row_facts()
    token = (np.arange(pages)[:, None] * view.page_size + token).reshape(-1)
    head, part = np.tile(head, pages), np.tile(part, pages)
    # rows that pad the heads repeat the last head: their results are dropped
    own = np.minimum(np.arange(rows), heads - 1) // (heads // view.heads)
    # the scores of a head stand in the column of its first row
    seen = (own[:, None] * view.head_rows == head) & (part == 0)
    return np.where(seen, token, NEVER).astype(np.int32)


def head_scores(
    query: jax.Array,  # [H, D]
    keys: jax.Array,  # [rows, D], or rows of a part of D
    view: PageView,
    precision: lax.Precision,
) -> jax.Array:  # float32[H, rows]
    """Scores of all heads; of a head that is several rows in the column of its first row."""
    width, total = keys.shape[1], None
    for n in range(view.head_rows):
        part = lax.dot_general(
            query[:, n * width : (n + 1) * width],
            keys,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        if total is None:
            total = part
        else:
            total += pltpu.roll(part, keys.shape[0] - n * view.row_distance, 1)
    assert total is not None
    return total


def weighted_values(
    weights: jax.Array,  # float32[H, rows], those of a head at its first row
    values: jax.Array,  # [rows, D], or rows of a part of D
    view: PageView,
    dtype: Any,
    precision: lax.Precision,
) -> jax.Array:  # float32[H, D]
    """The sums of the values of all heads."""
    parts = list[jax.Array]()
    for n in range(view.head_rows):
        moved = pltpu.roll(weights, n * view.row_distance, 1) if n else weights
        parts.append(
            jnp.dot(
                moved.astype(dtype), values, preferred_element_type=jnp.float32, precision=precision
            )
        )
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def live_scales(
    k_scale: jax.Array,  # bfloat16[NP, KVH, page_size]
    v_scale: jax.Array,
    page_table: jax.Array,  # int32[rows, P]
    first_page: jax.Array,  # int32[]
    low: jax.Array,  # int32[rows]
    high: jax.Array,  # int32[rows]
    *,
    view: PageView,
    pages: int,
) -> jax.Array:  # float32[rows, blocks, pages, 2, KVH, page_size]
    """The scales of each row's tokens low .. high - 1 in blocks of pages; of the others zero."""
    blocks = -(-page_table.shape[1] // pages)
    ids = jnp.pad(page_table, ((0, 0), (0, blocks * pages - page_table.shape[1]))) + first_page
    position = jnp.arange(ids.shape[1] * view.page_size).reshape(-1, 1, 1, view.page_size)
    low, high = (bound.reshape(-1, 1, 1, 1, 1) for bound in (low, high))
    held = jnp.stack([scales_of_pages(scale, ids) for scale in (k_scale, v_scale)], axis=2)
    # the scale of a token that no row sees may be NaN, and 0 * NaN is NaN
    held = jnp.where((position >= low) & (position < high), held, 0.0)
    return held.reshape(len(ids), blocks, pages, *held.shape[2:])


def block_scales(*operands: jax.Array, view: PageView, pages: int) -> jax.Array:
    """float32[rows, blocks, 2, columns / 128, 128]: `live_scales` as factors of the columns."""
    token, head, _ = view.row_facts()
    factors = live_scales(*operands, view=view, pages=pages)[..., head, token].swapaxes(2, 3)
    return factors.reshape(*factors.shape[:3], -1, LANES)

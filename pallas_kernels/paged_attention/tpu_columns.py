"""The columns of a block of keys of all heads: which token a row of the query sees in each, and the
scales of 8-bit pages as factors of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tpu_pages import LANES, PageView

NEVER = np.iinfo(np.int32).max  # the token of a column that no row may see


def times_columns(matrix: jax.Array, factors: jax.Array) -> jax.Array:
    """A matrix [H, rows] times factors [f, 128]; each 128 of them serve equally many columns."""
    chunks = matrix.shape[1] // LANES
    repeats = chunks // factors.shape[0]
    parts = [
        matrix[:, LANES * chunk : LANES * (chunk + 1)] * factors[chunk // repeats][None]
        for chunk in range(chunks)
    ]
    return jnp.concatenate(parts, axis=1)


def column_tokens(view: PageView, pages: int, heads: int, rows: int) -> np.ndarray:
    """int32[rows, columns]: the token of the block that a head sees there, or NEVER."""
    token, head, part = view.row_facts()
    token = (np.arange(pages)[:, None] * view.page_size + token).reshape(-1)
    head, part = np.tile(head, pages), np.tile(part, pages)
    # rows that pad the heads repeat the last head: their results are dropped
    own = np.minimum(np.arange(rows), heads - 1) // (heads // view.kv_heads)
    seen = (own[:, None] == head) & (part == 0)
    return np.where(seen, token, NEVER).astype(np.int32)


def block_scales(
    k_scale: jax.Array,  # float32[NP, KVH]
    v_scale: jax.Array,
    page_table: jax.Array,  # int32[rows, P]
    first_page: jax.Array,  # int32[]
    live: jax.Array,  # bool[rows, P]
    view: PageView,
    pages: int,
) -> jax.Array:  # float32[rows, blocks, 2, f, 128]
    """The scales of each row's pages as factors of the columns of a block.

    Where 128 columns hold the same heads as the next 128, a page has only one such set.
    """
    _, head, _ = view.row_facts()
    periodic = head.size % LANES == 0 and (head.reshape(-1, LANES) == head[:LANES]).all()
    head = head[:LANES] if periodic else head
    blocks = -(-page_table.shape[1] // pages)
    padding = ((0, 0), (0, blocks * pages - page_table.shape[1]))
    ids = jnp.pad(page_table, padding) + first_page
    live = jnp.pad(live, padding)[..., None]
    parts = []
    for scale in (k_scale, v_scale):
        # a scale that belongs to nobody's page may be NaN, and 0 * NaN is NaN
        of_page = jnp.where(live, scale.at[ids].get(mode="clip"), 0.0)
        parts.append(of_page[..., head].reshape(ids.shape[0], blocks, -1, LANES))
    return jnp.stack(parts, axis=2)

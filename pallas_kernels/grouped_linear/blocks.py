"""Which rows a block of a grouped product computes: a table that a kernel reads.

Rows that go to the same matrix lie in blocks of a fixed size, of which the last may be filled in
part. A block knows its matrix and how many of its places count, so blocks without rows cost a
kernel nothing, and no array is as long as the most rows that a matrix may have.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LEAST_ROWS, MOST_ROWS = 16, 64  # of a block


class Blocks(NamedTuple):
    """Blocks of R places, each of one group.

    Attributes:
        rows: int32[B * R], the row that each place holds; any number where none.
        groups: int32[B], the group of a block.
        counts: int32[B], places of a block that hold a row, the first ones; 0 where there is none.
    """

    rows: jax.Array
    groups: jax.Array
    counts: jax.Array

    @property
    def size(self) -> int:
        """Places of a block."""
        return self.rows.shape[0] // self.groups.shape[0]


def block_size(rows: int, groups: int, least: int = LEAST_ROWS, most: int = MOST_ROWS) -> int:
    """Places of a block: a power of two, twice the rows that a group has on average."""
    wanted = max(2 * rows // groups, 1)
    return min(max(1 << (wanted - 1).bit_length(), least), most)


def most_blocks(rows: int, groups: int, size: int) -> int:
    """Blocks that any division of the rows among the groups may need."""
    return rows // size + min(rows, groups)


def blocks_of(order: jax.Array, sizes: jax.Array, size: int | None = None) -> Blocks:
    """The blocks of rows that are sorted by group.

    Args:
        order: int32[M], the rows; those behind the last group are in none.
        sizes: int32[E], rows of each group.
        size: places of a block; None: `block_size`.
    """
    rows, groups = order.shape[0], sizes.shape[0]
    size = size or block_size(rows, groups)
    needed = -(-sizes // size)
    block_ends, row_ends = jnp.cumsum(needed), jnp.cumsum(sizes)
    index = jnp.arange(most_blocks(rows, groups, size))
    group = jnp.searchsorted(block_ends, index, side="right", method="compare_all")
    group = jnp.minimum(group, groups - 1).astype(jnp.int32)
    within = (index - (block_ends[group] - needed[group])) * size
    is_used = index < block_ends[-1]
    counts = jnp.where(is_used, jnp.clip(sizes[group] - within, 0, size), 0)
    first = row_ends[group] - sizes[group] + within
    places = jnp.clip(first[:, None] + jnp.arange(size), 0, max(rows - 1, 0))
    return Blocks(order[places].reshape(-1), group, counts.astype(jnp.int32))

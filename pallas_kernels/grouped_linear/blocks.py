"""Which rows a block of a grouped product computes: a table that a kernel reads.

Rows that go to the same matrix lie in blocks of a fixed size, of which the last may be filled in
part. A block knows its matrix and how many of its places count, so blocks without rows cost a
kernel nothing, and no array is as long as the most rows that a matrix may have.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sizes(NamedTuple):
    """How few and how many places a block may have, powers of two."""

    least: int
    most: int


GPU_SIZES = Sizes(16, 64)
TPU_SIZES = Sizes(32, 256)  # whole tiles of 8 bits; a matrix is read once a block


class Blocks(NamedTuple):
    """Blocks of R places, each of one group.

    Attributes:
        rows: int32[B, R], the row that each place holds; any number where none.
        groups: int32[B], the group of a block.
        counts: int32[B], places of a block that hold a row, the first ones; 0 where there is none.
    """

    rows: jax.Array
    groups: jax.Array
    counts: jax.Array

    @property
    def size(self) -> int:
        """Places of a block."""
        return self.rows.shape[1]


def block_size(rows: int, groups: int, sizes: Sizes = GPU_SIZES) -> int:
    """Places of a block: a power of two, twice the rows that a group has on average."""
    wanted = max(2 * rows // groups, 1)
    return min(max(1 << (wanted - 1).bit_length(), sizes.least), sizes.most)


def most_blocks(rows: int, groups: int, size: int) -> int:
    """Blocks that any division of the rows among the groups may need."""
    return rows // size + min(rows, groups)


def blocks_of(order: jax.Array, counts: jax.Array, sizes: Sizes = GPU_SIZES) -> Blocks:
    """The blocks of rows that are sorted by group.

    Args:
        order: int32[M], the rows; those behind the last group are in none.
        counts: int32[E], rows of each group.
        sizes: least and most places of a block.
    """
    rows, groups = order.shape[0], counts.shape[0]
    size = block_size(rows, groups, sizes)
    needed = -(-counts // size)
    block_ends, row_ends = jnp.cumsum(needed), jnp.cumsum(counts)
    index = jnp.arange(most_blocks(rows, groups, size))
    group = jnp.searchsorted(block_ends, index, side="right", method="compare_all")
    group = jnp.minimum(group, groups - 1).astype(jnp.int32)
    within = (index - (block_ends[group] - needed[group])) * size
    is_used = index < block_ends[-1]
    held = jnp.where(is_used, jnp.clip(counts[group] - within, 0, size), 0)
    first = row_ends[group] - counts[group] + within
    places = jnp.clip(first[:, None] + jnp.arange(size), 0, max(rows - 1, 0))
    return Blocks(order[places], group, held.astype(jnp.int32))

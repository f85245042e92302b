"""Divides a packed prefill region into the tiles that thread blocks attend, on the device.

The number of tiles is static, so one compiled program serves every mixture of chunks; which rows
of which lane a tile holds is a small table, computed by XLA once a step (the layers share it).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.lanes import PrefillLanes

ALIGNMENT = 8  # rows: a tiled copy begins at a multiple of this


class WorkItem(NamedTuple):
    """One tile of query rows: a row of the work table, in this order.

    A tile covers the rows [row, row + tile_rows) of the region, of which [row + low, row + high)
    are its own; `row` is a multiple of ALIGNMENT. Rows of no lane are in tiles that see no key.
    Spare tiles own no rows.
    """

    lane: jax.Array  # int32, a row of the page table
    row: jax.Array  # int32
    low: jax.Array  # int32
    high: jax.Array  # int32
    position: jax.Array  # int32, of `row` in its request; -high where no key is seen


def most_tiles(region: int, lanes: int, tile_rows: int) -> int:
    """The most tiles that any lanes and the gaps between them can need."""
    segments = 2 * lanes + 1
    return min(region, (region + segments * (tile_rows + ALIGNMENT - 2)) // tile_rows)


def divide(lanes: PrefillLanes, *, region: int, tile_rows: int) -> jax.Array:  # int32[T, 5]
    """The tiles of a region, those with the most keys first; every row of it is in a tile.

    Args:
        lanes: which rows of the region belong to which request.
        region: rows of the region, at least `tile_rows`; a multiple of ALIGNMENT.
        tile_rows: rows of a tile; a multiple of ALIGNMENT.

    Returns:
        One `WorkItem` a row.
    """
    start, length, context = lanes
    none = jnp.zeros(1, jnp.int32)
    end = start + length
    # a gap follows every lane, and one comes before the first; most of them are empty
    gap_start = jnp.concatenate([none, jnp.where(length > 0, end, region)])
    follows = (length > 0) & (start >= gap_start[:, None])  # [N + 1, N]
    gap_end = jnp.min(jnp.where(follows, start, region), axis=1, initial=region)
    segment_start = jnp.concatenate([start, gap_start])
    segment_length = jnp.concatenate([length, gap_end - gap_start])
    segments = 2 * len(start) + 1

    aligned = segment_start - segment_start % ALIGNMENT
    tiles = -(-(segment_start + segment_length - aligned) // tile_rows)
    tiles = jnp.where(segment_length > 0, tiles, 0)
    order = jnp.arange(segments)
    before = jnp.sum(jnp.where(order < order[:, None], tiles, 0), axis=1)
    number = jnp.arange(most_tiles(region, len(start), tile_rows))
    inside = (number[:, None] >= before) & (number[:, None] < before + tiles)  # [T, segments]
    used = inside.any(axis=1)
    segment = jnp.argmax(inside, axis=1)

    first, size = segment_start[segment], segment_length[segment]
    row = aligned[segment] + tile_rows * (number - before[segment])
    row = jnp.clip(row, 0, region - tile_rows)
    low = jnp.maximum(first - row, 0)
    high = jnp.where(used, jnp.minimum(first + size - row, tile_rows), 0)
    attends = used & (segment < len(start))
    lane = jnp.where(attends, segment, 0)
    position = jnp.where(attends, context[lane] + row - first, -high)

    # the longest first: a long tile that began last would be waited for alone
    keys = jnp.where(used, position + high, -1)
    ahead = (keys > keys[:, None]) | ((keys == keys[:, None]) & (number < number[:, None]))
    rank = jnp.sum(ahead, axis=1)
    item = WorkItem(lane, row, jnp.where(used, low, 0), high, position)
    table = jnp.stack([column.astype(jnp.int32) for column in item], axis=1)
    return jnp.zeros_like(table).at[rank].set(table, unique_indices=True)

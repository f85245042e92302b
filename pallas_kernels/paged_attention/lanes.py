"""The lanes of a packed prefill region, and the tiles of rows into which kernels divide them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PrefillLanes(NamedTuple):
    """The rows of each request in a packed prefill region; a lane is a row of its table.

    Lane n owns rows [start, start + length) of the region; they are the tokens at the absolute
    positions context .. context + length - 1. A lane of length 0 is unused. Lanes do not overlap.
    """

    start: jax.Array  # int32[N]
    length: jax.Array  # int32[N]
    context: jax.Array  # int32[N]


class Tiles(NamedTuple):
    """The tiles of all lanes, one lane after the other, then tiles without rows."""

    lane: jax.Array  # int32[T]
    first_row: jax.Array  # int32[T], in the region
    rows: jax.Array  # int32[T]; 0 = no work
    position: jax.Array  # int32[T], of the first row in its request


def tile_counts(lanes: PrefillLanes, tile: int) -> tuple[jax.Array, jax.Array]:
    """The number of tiles of each lane, and the end of its tiles: int32[N] each."""
    counts = (lanes.length + tile - 1) // tile
    return counts, jnp.cumsum(counts)


def divide(lanes: PrefillLanes, region: int, tile: int, *, backwards: bool = False) -> Tiles:
    """Divides each lane into tiles of `tile` rows; a region has at most region // tile + N.

    `backwards`: the last tile first; of a lane it sees the most keys.
    """
    counts, ends = tile_counts(lanes, tile)
    number = jnp.arange(region // tile + len(ends), dtype=jnp.int32)[:: -1 if backwards else 1]
    lane = jnp.minimum(jnp.sum(ends <= number[:, None], axis=1), len(ends) - 1).astype(jnp.int32)
    done = (number - (ends[lane] - counts[lane])) * tile
    rows = jnp.clip(lanes.length[lane] - done, 0, tile)
    return Tiles(lane, lanes.start[lane] + done, rows, lanes.context[lane] + done)

"""The division of a packed region's lanes into tiles, against a plain walk over its rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels import PrefillLanes
from pallas_kernels.paged_attention.lanes import divide
from tests.pallas_kernels.cases import packed_lanes


@pytest.mark.parametrize("tile", [1, 8, 42])
def test_tiles_cover_every_row_of_every_lane_once(tile):
    rng, region = np.random.default_rng(tile), 100
    tiles_of = jax.jit(divide, static_argnames=("region", "tile"))
    for chunks in ([0, 0, 0], [1, 0, 5], [8, 16, 3], [42, 1, 43], [0, 0, 85]):
        contexts = [int(context) for context in rng.integers(0, 100, 3)]
        lanes, used = packed_lanes(rng, chunks, contexts, gaps=True)
        assert used <= region
        lanes = PrefillLanes(*(np.asarray(part) for part in lanes))
        tiles = jax.tree.map(np.asarray, tiles_of(lanes, region=region, tile=tile))
        assert tiles.rows[: (tiles.rows > 0).sum()].all()  # those without rows are the last ones
        covered = []
        for lane, first_row, rows, position in zip(*tiles):
            assert 0 <= lane < 3 and 0 <= rows <= tile
            assert rows == 0 or position - first_row == contexts[lane] - lanes.start[lane]
            covered += [(int(lane), row) for row in range(first_row, first_row + rows)]
        owned = [
            (lane, row)
            for lane, (start, length) in enumerate(zip(lanes.start, lanes.length))
            for row in range(int(start), int(start + length))
        ]
        assert sorted(covered) == sorted(owned)

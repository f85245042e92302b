"""The table of query tiles of a packed prefill region, against a plain walk over its rows."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.paged_attention.hopper import prefill_work
from tests.pallas_kernels.cases import packed_lanes

REGION, LANES = 96, 5


@functools.partial(jax.jit, static_argnames="tile_rows")
def divide(lanes, tile_rows):
    return prefill_work.divide(lanes, region=REGION, tile_rows=tile_rows)


def random_lanes(rng, gaps):
    """Chunks of all sizes in one region, some of them empty."""
    while True:
        chunks = [int(rng.choice([0, 1, 7, 8, 9, 16, 17, 33, 64])) for _ in range(LANES)]
        lanes, region = packed_lanes(rng, chunks, list(rng.integers(0, 300, LANES)), gaps)
        if region <= REGION:
            return lanes


@pytest.mark.parametrize("tile_rows", [8, 32, 64])
@pytest.mark.parametrize("gaps", [True, False])
def test_every_row_is_attended_for_its_own_lane(tile_rows, gaps):
    rng = np.random.default_rng(tile_rows)
    for _ in range(25):
        lanes = random_lanes(rng, gaps)
        table = np.asarray(divide(lanes, tile_rows))
        assert len(table) == prefill_work.most_tiles(REGION, LANES, tile_rows)
        owner = np.full(REGION, -1)
        position = np.full(REGION, -1)
        for lane, (start, length, context) in enumerate(zip(*map(np.asarray, lanes))):
            owner[start : start + length] = lane
            position[start : start + length] = context + np.arange(length)
        seen = np.zeros(REGION, bool)
        for item in (prefill_work.WorkItem(*row) for row in table):
            assert item.row % prefill_work.ALIGNMENT == 0
            assert 0 <= item.row <= REGION - tile_rows
            assert 0 <= item.low <= item.high <= tile_rows
            own = np.arange(item.row + item.low, item.row + item.high)
            seen[own] = True
            if item.position + item.high == 0:  # sees no key: rows of no lane
                assert (owner[own] == -1).all()
            else:
                assert (owner[own] == item.lane).all()
                assert (position[own] == item.position + own - item.row).all()
        assert seen.all()


def test_the_tiles_with_the_most_keys_come_first():
    lanes = random_lanes(np.random.default_rng(0), gaps=True)
    keys = [row[4] + row[3] for row in np.asarray(divide(lanes, 32))]
    assert keys == sorted(keys, reverse=True)
    assert keys[0] == max(np.asarray(lanes.context + lanes.length)[np.asarray(lanes.length) > 0])


def test_the_number_of_tiles_suffices_for_the_worst_lanes():
    """Lanes of one row, each the last of an aligned group, with a gap before and after each."""
    starts = np.asarray([7, 15, 23, 31, 39], np.int32)
    lanes = (starts, np.ones(5, np.int32), np.zeros(5, np.int32))
    table = np.asarray(divide(lanes, 8))
    used = (table[:, 3] > table[:, 2]).sum()
    assert used == 5 + 4 + 1 + 7

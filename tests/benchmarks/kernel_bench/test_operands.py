"""Every operation of a program, and every rotation, reads pages of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.kernel_bench.cases import DecodeCase
from benchmarks.kernel_bench.operands import layout, make_pool, page_tables


def test_pages_of_layers_and_rotations_do_not_overlap():
    case = DecodeCase(2, 40, 4, 2, head_dim=16)
    cold = 50 * case.layer_bytes
    pool = make_pool(case, memory=2**22, cold_bytes=cold)
    seen = [
        np.asarray(table).ravel() + pool.first_page(layer)
        for table in pool.tables
        for layer in range(pool.copies)
    ]
    ids = np.concatenate(seen)
    assert len(set(ids.tolist())) == len(ids)
    assert ids.min() == 1 and ids.max() == pool.kv_pages.shape[0] - 1
    assert pool.layers == pool.copies == 16 and len(pool.tables) == 3
    assert np.isfinite(np.asarray(pool.kv_pages, np.float32)).all()


def test_large_layers_are_read_again_and_too_large_ones_refused():
    case = DecodeCase(64, 16384, 32, 8)  # 4 GiB a layer
    assert layout(case, memory=6 * 2**30, cold_bytes=2**30) == (2, 1, 1)
    with pytest.raises(MemoryError, match=r"4\.0 GiB of pages, 3\.0 GiB"):
        layout(case, memory=3 * 2**30, cold_bytes=2**30)
    # a small one cycles through more than the cache holds
    small = DecodeCase(1, 128, 32, 8)
    layers, distinct, rotations = layout(small, memory=6 * 2**30, cold_bytes=2**30)
    assert layers == distinct == 16
    assert distinct * rotations * small.layer_bytes >= 2**29


def test_a_ragged_table_names_every_page_of_the_uniform_one_once():
    case = DecodeCase(3, 64, 4, 2, ragged=True)
    (ragged, later), (even, _) = (
        page_tables(c, 2, 12) for c in (case, replace(case, ragged=False))
    )
    assert ragged.shape == (3, 8) and even.shape == (3, 4)
    assert [int((row > 0).sum()) for row in np.asarray(ragged)] == [8, 2, 2]
    held = np.asarray(ragged)[np.asarray(ragged) > 0]
    assert sorted(held) == sorted(np.asarray(even).ravel()) == list(range(1, 13))
    moved = np.asarray(later)
    assert (moved[moved > 0] == held + 12).all() and (moved == 0).sum() == 12

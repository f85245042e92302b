"""The Mosaic TPU kernels in JAX's TPU interpreters against float64."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import (
    KernelError,
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)
from pallas_kernels.backends.mosaic_tpu import TpuDecodeTuning, TpuPrefillTuning
from pallas_kernels.paged_attention.lanes import divide
from pallas_kernels.paged_attention.tpu import queries as tpu_queries
from pallas_kernels.paged_attention.tpu.prefill import computed_at
from pallas_kernels.tpu_pages import Order, PageView
from tests.pallas_kernels.cases import packed_lanes
from tests.pallas_kernels.paged_attention.checks import (
    check_decode,
    check_prefill,
    check_queries_as_rows,
)
from tests.pallas_kernels.strategies import Program, Slots, examples, lanes, slots
from tests.pallas_kernels.tpu_interpreter import INTERPRETER, no_races

# small blocks, so that short contexts have several and the ring of buffers turns
DECODE_TUNING = TpuDecodeTuning(block_tokens=128, stages=3, cores=1)
TWO_CORES = TpuDecodeTuning(block_tokens=128, stages=2, cores=2)
PREFILL_TUNING = TpuPrefillTuning(tile_rows=64, block_tokens=128, stages=3)
ALL = {"soft_cap": 5.0, "sinks": True}

QUICK = Program(4, 1, 128, 32, "bfloat16", window=140, columns=10, chunk=70, edge=128, **ALL)
# every pool; every order of a page in memory
MORE = [
    Program(8, 8, 128, 16, "bfloat16", columns=19, edge=128),
    Program(16, 8, 128, 32, "float32", window=140, columns=10, chunk=70, edge=128, **ALL),
    Program(8, 2, 128, 16, "bfloat16", sinks=True, columns=19, edge=128),
    Program(9, 3, 128, 64, "bfloat16", window=1, chunk=70, edge=128),
    Program(6, 6, 128, 16, "float32", soft_cap=3.0, columns=19, edge=128),
    Program(8, 8, 256, 16, "bfloat16", window=20, columns=19, edge=128),
    Program(4, 4, 128, 128, "bfloat16", columns=3, chunk=130, rows=4, edge=128),
    Program(16, 8, 128, 16, "int8", window=50, columns=19, edge=128),
    Program(8, 4, 128, 32, "int8", window=140, columns=10, per_token=False, edge=128, **ALL),
    Program(4, 2, 128, 16, "int8", columns=19, edge=128),
    Program(8, 8, 128, 16, "float8_e4m3fn", sinks=True, columns=19, edge=128),
    Program(2, 1, 128, 32, "float8_e4m3fn", window=30, columns=10, edge=128),
    # heads of 256 as two rows: Gemma-3-1B, Gemma-2-2B, Gemma-3-4B; and the orders of 8-bit pages
    Program(4, 1, 256, 16, "bfloat16", window=50, columns=19, chunk=70, edge=128, head_rows=2),
    Program(8, 4, 256, 32, "bfloat16", window=140, columns=10, edge=128, head_rows=2, **ALL),
    Program(6, 2, 256, 128, "float32", soft_cap=3.0, columns=3, rows=4, edge=128, head_rows=2),
    Program(6, 3, 256, 16, "bfloat16", sinks=True, columns=19, edge=128, head_rows=2),
    Program(4, 1, 256, 32, "int8", columns=10, per_token=False, edge=128, head_rows=2),
    Program(
        8,
        4,
        256,
        16,
        "float8_e4m3fn",
        window=30,
        columns=19,
        edge=128,
        per_token=False,
        head_rows=2,
    ),
]
QUERIES = Program(4, 1, 128, 32, "bfloat16", window=140, columns=10, edge=128, queries=5, **ALL)
MORE_QUERIES = [
    Program(8, 8, 128, 16, "bfloat16", columns=19, edge=128, queries=8),
    Program(16, 8, 128, 32, "float32", window=140, columns=10, edge=128, queries=3, **ALL),
    Program(9, 3, 128, 64, "bfloat16", window=1, edge=128, queries=2),
    Program(8, 8, 256, 16, "bfloat16", window=20, columns=19, edge=128, queries=5),
    Program(16, 8, 128, 16, "int8", window=50, columns=19, edge=128, queries=8),
    Program(8, 4, 128, 32, "int8", columns=10, per_token=False, edge=128, queries=5, **ALL),
    Program(2, 1, 128, 32, "float8_e4m3fn", window=30, columns=10, edge=128, queries=3),
    Program(8, 4, 256, 32, "bfloat16", window=140, columns=10, edge=128, queries=5, head_rows=2),
]
DECODE = {"backend": "mosaic_tpu", "tuning": DECODE_TUNING, "interpret": INTERPRETER}
PREFILL = {"backend": "mosaic_tpu", "tuning": PREFILL_TUNING, "interpret": INTERPRETER}


@examples(2)
@given(data=st.data())
def test_decode(capfd, data):
    check_decode(QUICK, data.draw(slots(QUICK)), **DECODE)
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("program", MORE, ids=str)
@examples(2)
@given(data=st.data())
def test_decode_of_every_kind(capfd, program, data):
    check_decode(program, data.draw(slots(program)), **{**DECODE, "tuning": TWO_CORES})
    assert no_races(capfd)


@pytest.mark.slow
@examples(1)
@given(data=st.data())
def test_decode_of_several_queries(capfd, data):
    check_decode(QUERIES, data.draw(slots(QUERIES)), **DECODE)
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("program", MORE_QUERIES, ids=str)
@examples(2)
@given(data=st.data())
def test_several_queries_of_every_kind(capfd, program, data):
    check_decode(program, data.draw(slots(program)), **{**DECODE, "tuning": TWO_CORES})
    assert no_races(capfd)


@pytest.mark.slow
@examples(1)
@given(data=st.data())
def test_queries_in_several_chunks_over_small_blocks(monkeypatch, data):
    """As where the scores of all queries are too many for VMEM."""
    jax.clear_caches()
    monkeypatch.setattr(tpu_queries, "SCORE_BYTES", 1)
    for program in (MORE_QUERIES[0], MORE_QUERIES[4], QUERIES):
        check_decode(program, data.draw(slots(program)), **DECODE)
    jax.clear_caches()


def test_the_queries_of_a_chunk_begin_with_whole_tiles_and_their_scores_are_bounded():
    heads = tpu_queries.Queries(8, 32, 2048, length=0, count=0, window=None)
    assert heads.chunks() == [range(8)]
    assert replace(heads, columns=4096).chunks() == [range(4), range(4, 8)]
    assert replace(heads, number=5, columns=4096).chunks() == [range(4), range(4, 5)]
    assert replace(heads, number=3, columns=1 << 20).chunks() == [range(2), range(2, 3)]
    view = PageView(Order.WHOLE_TILES, page_size=16, kv_heads=64, head_dim=128)
    tuning = TpuDecodeTuning(block_tokens=256, stages=4)
    assert tpu_queries.query_block(view, 2, 64, tuning) == (2, 2)
    assert tpu_queries.query_block(replace(view, kv_heads=8), 2, 32, tuning) == (16, 4)


@pytest.mark.slow
@examples(1)
@given(data=st.data())
def test_several_queries_are_as_many_calls_of_one(data):
    check_queries_as_rows(QUERIES, data.draw(slots(QUERIES)), **DECODE)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[0] * 6, [0, 200, 0, 0, 0, 0]], ids=str)
def test_slots_without_work_between_two_cores(lengths, capfd):
    idle = Slots(lengths, {}, stale=True, seed=0)
    check_decode(MORE[2], idle, **{**DECODE, "tuning": TWO_CORES})
    assert no_races(capfd)


@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_prefill(capfd, data):
    check_prefill(QUICK, data.draw(lanes(QUICK)), **PREFILL)
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("program", MORE, ids=str)
@examples(2)
@given(data=st.data())
def test_prefill_of_every_kind(capfd, program, data):
    check_prefill(program, data.draw(lanes(program)), **PREFILL)
    assert no_races(capfd)


@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_the_plain_interpreter(data):
    program = Program(4, 2, 128, 16, "bfloat16", rows=3)
    check_decode(program, data.draw(slots(program)), **{**DECODE, "interpret": True})
    check_prefill(program, data.draw(lanes(program)), **{**PREFILL, "interpret": True})


def test_every_row_is_found_where_its_tile_computes_it():
    rng, region = np.random.default_rng(2), 4 * 63  # at least as large as any of these
    tiles_of, places_of = (jax.jit(one, static_argnums=(1, 2)) for one in (divide, computed_at))
    for _ in range(20):
        chunks = [int(n) for n in rng.integers(0, 60, 4)]
        lanes, _ = packed_lanes(rng, chunks, [0] * 4, gaps=True)
        tiles = jax.tree.map(np.asarray, tiles_of(lanes, region, 16))
        tile, place, owned = map(np.asarray, places_of(lanes, region, 16))
        assert owned.sum() == sum(chunks)
        rows = np.flatnonzero(owned)
        np.testing.assert_array_equal(tiles.first_row[tile[rows]] + place[rows], rows)
        assert (place[rows] < tiles.rows[tile[rows]]).all()


def decode_operands(heads=8, kv_heads=8, head_dim=128, page_size=16, pool="bfloat16", columns=2):
    return {
        "q": jnp.zeros((3, heads, head_dim), jnp.bfloat16),
        "kv_pages": jnp.zeros((4, page_size, 2, kv_heads, head_dim), pool),
        "page_table": jnp.zeros((3, columns), jnp.int32),
        "kv_lens": jnp.zeros(3, jnp.int32),
        "scale": 1.0,
        "backend": "mosaic_tpu",
    }


REFUSED = [
    ({"head_dim": 64}, {}, "head_dim"),
    ({"head_dim": 256, "kv_heads": 2}, {}, "kv_heads"),
    ({"page_size": 8}, {}, "page_size"),
    ({"pool": "float16"}, {}, "kv_pages.dtype"),
    ({"pool": "uint16"}, {}, "kv_pages.dtype"),
    ({"columns": 70_000}, {}, "page_table.shape"),
    ({}, {"q": jnp.zeros((3, 8, 128), jnp.float16)}, "q.dtype"),
    ({}, {"splits": 2}, "splits"),
    ({}, {"tuning": TpuDecodeTuning(block_tokens=64)}, "tuning.block_tokens"),
]


@pytest.mark.parametrize(("shape", "change", "field"), REFUSED, ids=str)
def test_refusals_name_what_is_refused(shape, change, field):
    with pytest.raises(KernelError) as caught:
        paged_decode_attention(**{**decode_operands(**shape), **change})
    assert caught.value.field == field


def test_prefill_refuses_likewise():
    idle = jnp.zeros(3, jnp.int32)
    for shape, tuning, field in (
        ({"head_dim": 64}, None, "head_dim"),
        ({"columns": 70_000}, None, "page_table.shape"),
        ({}, TpuPrefillTuning(block_tokens=100), "tuning.block_tokens"),
    ):
        operands = decode_operands(**shape)
        del operands["kv_lens"]
        run = functools.partial(paged_prefill_attention, lanes=PrefillLanes(idle, idle, idle))
        with pytest.raises(KernelError) as caught:
            run(**operands, tuning=tuning)
        assert caught.value.field == field

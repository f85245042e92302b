"""The Mosaic TPU kernels in JAX's TPU interpreters against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import (
    KernelError,
    PrefillLanes,
    paged_decode_attention,
    paged_prefill_attention,
)
from pallas_kernels.paged_attention.mosaic_tpu_prefill import divide
from pallas_kernels.tuning import DecodeTuning, PrefillTuning
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import packed_lanes, paged_case

# memory that nothing has written is NaN there, and DMAs run when they are waited for
INTERPRETER = pltpu.InterpretParams(detect_races=True)
# small blocks, so that short contexts have several and the ring of buffers turns
DECODE_TUNING = DecodeTuning(block_tokens=128, stages=3, multiprocessors=1)
TWO_CORES = DecodeTuning(block_tokens=128, stages=2, multiprocessors=2)
PREFILL_TUNING = PrefillTuning(tile_rows=64, block_tokens=128, stages=3)
EVERYTHING = {"window": 140, "soft_cap": 5.0, "sinks": True}

# heads, kv_heads, head_dim, page size, pool, options; one for each order of a page in memory
QUICK = (4, 1, 128, 32, "bfloat16", EVERYTHING)
CASES = [
    (8, 8, 128, 16, "bfloat16", {}),
    (16, 8, 128, 32, "float32", EVERYTHING),
    (8, 2, 128, 16, "bfloat16", {"sinks": True}),
    (9, 3, 128, 64, "bfloat16", {"window": 1}),
    (6, 6, 128, 16, "float32", {"soft_cap": 3.0}),
    (8, 8, 256, 16, "bfloat16", {"window": 20}),
    (4, 4, 128, 128, "bfloat16", {}),
    (16, 8, 128, 16, "int8", {"window": 50}),
    (8, 4, 128, 32, "int8", EVERYTHING),
    (4, 2, 128, 16, "int8", {}),
    (8, 8, 128, 16, "float8_e4m3fn", {"sinks": True}),
    (2, 1, 128, 32, "float8_e4m3fn", {"window": 30}),
]


def options_of(case, options, heads, head_dim, rng):
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    return {**options, "scale": head_dim**-0.5, **case.options}


def check_decode(shape, lengths, *, interpret=INTERPRETER, tuning=DECODE_TUNING, **case_options):
    heads, kv_heads, head_dim, page_size, pool, options = shape
    rng = np.random.default_rng(0)
    case = paged_case(
        rng,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        first_page=3,
        **case_options,
    )
    options = options_of(case, options, heads, head_dim, rng)
    got = paged_decode_attention(
        *case[:4], backend="mosaic_tpu", tuning=tuning, interpret=interpret, **options
    )
    want = oracle.decode(*case[:4], **options)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
    assert not np.asarray(got, np.float32)[np.asarray(lengths) == 0].any()


def boundary_lengths(page_size):
    return [299, 300, 0, 1, page_size - 1, page_size, page_size + 1]


def no_races(capfd):
    return "RACE" not in "".join(capfd.readouterr())


def test_decode(capfd):
    check_decode(QUICK, boundary_lengths(32))
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_decode_of_every_kind(shape, capfd):
    per_page = shape[1] != 4
    check_decode(shape, boundary_lengths(shape[3]), per_page=per_page, tuning=TWO_CORES)
    assert no_races(capfd)


@pytest.mark.slow
def test_decode_in_the_plain_interpreter():
    check_decode((8, 8, 128, 16, "bfloat16", {}), [40, 0, 17], interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 200, 0]], ids=str)
def test_slots_without_work_between_two_cores(lengths, capfd):
    check_decode((8, 2, 128, 16, "bfloat16", EVERYTHING), lengths, tuning=TWO_CORES)
    assert no_races(capfd)


def check_prefill(shape, chunks, contexts, *, interpret=INTERPRETER, **case_options):
    heads, kv_heads, head_dim, page_size, pool, options = shape
    rng = np.random.default_rng(1)
    lanes, region = packed_lanes(rng, chunks, contexts, gaps=True)
    case = paged_case(
        rng,
        [chunk + context if chunk else 0 for chunk, context in zip(chunks, contexts)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        rows=region,
        first_page=2,
        share=False,
        **case_options,
    )
    options = options_of(case, options, heads, head_dim, rng)
    got = paged_prefill_attention(
        *case[:3],
        lanes,
        backend="mosaic_tpu",
        tuning=PREFILL_TUNING,
        interpret=interpret,
        **options,
    )
    want = oracle.prefill(*case[:3], lanes, **options)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
    assert not np.asarray(got, np.float32)[~want.any(axis=(1, 2))].any()


def ragged(page_size):
    """Chunks and contexts: an idle lane, one row, more rows than a tile, full last pages."""
    return [page_size + 1, 0, 1, 70, page_size - 1], [0, 7, 3 * page_size - 1, 300, page_size]


def test_prefill(capfd):
    check_prefill(QUICK, *ragged(32))
    assert no_races(capfd)


@pytest.mark.slow
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_prefill_of_every_kind(shape, capfd):
    check_prefill(shape, *ragged(shape[3]), per_page=shape[1] != 4)
    assert no_races(capfd)


@pytest.mark.slow
def test_prefill_in_the_plain_interpreter():
    check_prefill((4, 2, 128, 16, "bfloat16", {}), [20, 0, 3], [0, 5, 30], interpret=True)


def test_tiles_cover_every_row_of_every_lane_once():
    rng = np.random.default_rng(2)
    tiles = jax.jit(divide, static_argnums=(3, 4))
    for _ in range(20):
        chunks = [int(n) for n in rng.integers(0, 60, 4)]
        contexts = [int(n) for n in rng.integers(0, 100, 4)]
        lanes, _ = packed_lanes(rng, chunks, contexts, gaps=True)
        region = 4 * 63  # at least as large as any of these
        jobs = jax.tree.map(np.asarray, tiles(*lanes, region, 16))
        live = np.flatnonzero(jobs.tokens)
        assert (live == np.arange(live.size)).all()  # idle jobs are the last ones
        owner = np.full(region, -1)
        for job in live:
            rows = jobs.first_row[job] + np.arange(jobs.tokens[job])
            assert (owner[rows] == -1).all()
            owner[rows] = job
            np.testing.assert_array_equal(jobs.job_of_row[rows], job)
            np.testing.assert_array_equal(jobs.place_of_row[rows], np.arange(rows.size))
            lane = jobs.lane[job]
            offset = int(jobs.first_row[job] - lanes.start[lane])
            assert jobs.position[job] == contexts[lane] + offset
        np.testing.assert_array_equal(owner >= 0, jobs.owned)
        assert (owner >= 0).sum() == sum(chunks)


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
    ({}, {"tuning": DecodeTuning(block_tokens=64)}, "tuning.block_tokens"),
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
        ({}, PrefillTuning(block_tokens=100), "tuning.block_tokens"),
    ):
        operands = decode_operands(**shape)
        del operands["kv_lens"]
        run = functools.partial(paged_prefill_attention, lanes=PrefillLanes(idle, idle, idle))
        with pytest.raises(KernelError) as caught:
            run(**operands, tuning=tuning)
        assert caught.value.field == field

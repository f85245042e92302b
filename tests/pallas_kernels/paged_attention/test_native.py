"""The native backend against a float64 oracle, with NaN wherever nobody may look."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PrefillLanes, paged_decode_attention, paged_prefill_attention
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import packed_lanes, paged_case
from tests.pallas_kernels.native.requirements import require_native

require_native()
STATIC = ("scale", "soft_cap", "window", "first_page", "backend")
decode = functools.partial(
    jax.jit(paged_decode_attention, static_argnames=STATIC), backend="native"
)
prefill = functools.partial(
    jax.jit(paged_prefill_attention, static_argnames=STATIC), backend="native"
)
# heads, kv_heads, head_dim, page_size: whole vectors, groups of 1, 3, 8 and 71, odd head sizes
SHAPES = [
    (12, 4, 64, 16),
    (4, 4, 128, 8),
    (8, 1, 256, 32),
    (6, 2, 80, 4),
    (71, 1, 16, 1),
    (3, 3, 36, 16),
]
QUICK_POOLS = ("uint16", "float32", "int8", "uint8")
MATRIX = [
    pytest.param(SHAPES[0], pool, marks=() if pool in QUICK_POOLS else pytest.mark.slow)
    for pool in oracle.TOLERANCE
]
MATRIX += [(shape, "uint16") for shape in SHAPES[1:]]
MATRIX += [
    pytest.param(shape, "float32", marks=() if shape == SHAPES[3] else pytest.mark.slow)
    for shape in SHAPES[1:]
]


def options_of(heads: int, variant: int, page_size: int) -> dict:
    """Plain; or a window, a soft cap that bends the scores, and sinks of some weight."""
    if variant == 0:
        return {}
    return {
        "window": page_size + 3,
        "soft_cap": 2.0,
        "sinks": jnp.linspace(-2.0, 3.0, heads),
    }


@pytest.mark.parametrize(("shape", "pool"), MATRIX, ids=str)
def test_decode_and_prefill(shape, pool):
    heads, kv_heads, head_dim, page_size = shape
    rng = np.random.default_rng(0)
    lengths = [129, 0, 1, 63, 64, 65, page_size, 17, 200]
    case = paged_case(
        rng,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        first_page=5,
    )
    chunks = [min(length, part) for length, part in zip(lengths, (40, 0, 1, 63, 7, 1, 1, 17, 90))]
    contexts = [length - chunk for length, chunk in zip(lengths, chunks)]
    lanes, region = packed_lanes(rng, chunks, contexts, gaps=True)
    q = jnp.asarray(rng.standard_normal((region, heads, head_dim)), case.q.dtype)
    for variant in range(2):
        options = options_of(heads, variant, page_size)
        options |= {"scale": head_dim**-0.5, **case.options}
        got = decode(case.q, case.kv_pages, case.page_table, case.lengths, **options)
        want = oracle.decode(case.q, case.kv_pages, case.page_table, case.lengths, **options)
        assert got.dtype == case.q.dtype
        assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
        assert not np.asarray(got, np.float32)[1].any()
        got = prefill(q, case.kv_pages, case.page_table, lanes, **options)
        want = oracle.prefill(q, case.kv_pages, case.page_table, lanes, **options)
        assert got.dtype == q.dtype
        assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
        assert not np.asarray(got, np.float32)[(want == 0).all(axis=(1, 2))].any()


@pytest.mark.parametrize("pool", ["uint16", "float32"])
def test_random_ragged(pool):
    rng = np.random.default_rng(1)
    for _ in range(4):
        lengths = [int(n) for n in rng.integers(0, 300, 6)]
        case = paged_case(
            rng,
            lengths,
            heads=6,
            kv_heads=2,
            head_dim=64,
            page_size=16,
            pool=pool,
            columns=20,
            total=6 * 20 + 1,
        )
        got = decode(case.q, case.kv_pages, case.page_table, case.lengths, scale=0.125)
        want = oracle.decode(case.q, case.kv_pages, case.page_table, case.lengths, scale=0.125)
        assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]


def test_queries_of_another_type_than_the_pages():
    rng = np.random.default_rng(2)
    case = paged_case(rng, [70], heads=4, kv_heads=2, head_dim=64, page_size=16, pool="uint16")
    q = case.q.astype(jnp.float32)
    got = decode(q, case.kv_pages, case.page_table, case.lengths, scale=0.125)
    want = oracle.decode(q, case.kv_pages, case.page_table, case.lengths, scale=0.125)
    assert got.dtype == jnp.float32
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE["uint16"]


def test_a_nan_that_a_row_sees_reaches_its_result_alone():
    rng = np.random.default_rng(3)
    case = paged_case(
        rng, [20, 20], heads=2, kv_heads=1, head_dim=64, page_size=4, pool="float32", share=False
    )
    poisoned = case.kv_pages.at[case.page_table[0, 1], 0, 0, 0, 3].set(jnp.nan)
    got = np.asarray(decode(case.q, poisoned, case.page_table, case.lengths, scale=0.125))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


def test_no_lane_and_no_live_slot_give_zeros():
    rng = np.random.default_rng(4)
    case = paged_case(rng, [0, 0], heads=2, kv_heads=1, head_dim=64, page_size=4, pool="uint16")
    none = jnp.zeros(2, jnp.int32)
    assert not np.asarray(
        decode(case.q, case.kv_pages, case.page_table, case.lengths, scale=1.0), np.float32
    ).any()
    lanes = PrefillLanes(none, none, none)
    out = prefill(case.q, case.kv_pages, case.page_table, lanes, scale=1.0)
    assert not np.asarray(out, np.float32).any()

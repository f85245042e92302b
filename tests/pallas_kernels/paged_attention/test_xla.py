"""The XLA and reference backends against a float64 oracle, with NaN wherever nobody may look."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PrefillLanes, paged_decode_attention, paged_prefill_attention
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import packed_lanes, paged_case

# heads, kv_heads, head_dim, page_size
SHAPES = [(4, 4, 64, 16), (8, 2, 64, 16), (8, 1, 128, 32), (6, 2, 80, 8), (3, 3, 16, 128)]
BACKENDS = ("reference", "xla")
# every pool type once, every shape in the two types that take different paths
MATRIX = [(SHAPES[1], pool, "xla") for pool in oracle.TOLERANCE]
MATRIX += [(shape, "uint16", "xla") for shape in (SHAPES[0], *SHAPES[2:])]
MATRIX += [(SHAPES[3], "float32", "xla"), (SHAPES[1], "float32", "reference")]
MATRIX += [(SHAPES[2], "uint16", "reference"), (SHAPES[3], "int8", "reference")]
STATIC = ("scale", "soft_cap", "window", "first_page", "backend")
jit_decode = jax.jit(paged_decode_attention, static_argnames=STATIC)
jit_prefill = jax.jit(paged_prefill_attention, static_argnames=STATIC)


def extras(heads: int) -> dict:
    """A soft cap that bends the scores and sinks of some weight."""
    return {"soft_cap": 2.0, "sinks": jnp.linspace(-2.0, 3.0, heads)}


def check_decode(case, window, backend, pool, **more):
    options = {"scale": case.q.shape[-1] ** -0.5, "window": window, **case.options, **more}
    got = jit_decode(
        case.q, case.kv_pages, case.page_table, case.lengths, backend=backend, **options
    )
    want = oracle.decode(case.q, case.kv_pages, case.page_table, case.lengths, **options)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
    assert not np.asarray(got, np.float32)[np.asarray(case.lengths) == 0].any()


@pytest.mark.parametrize(("shape", "pool", "backend"), MATRIX, ids=str)
def test_decode(shape, pool, backend):
    heads, kv_heads, head_dim, page_size = shape
    rng = np.random.default_rng(0)
    longest = 5 * page_size
    lengths = [longest - 1, longest, 0, 1, page_size - 1, page_size, page_size + 1]
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
    check_decode(case, None, backend, pool)
    check_decode(case, page_size + 3, backend, pool, **extras(heads))


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_decode_long_ragged(window):
    rng = np.random.default_rng(1)
    for _ in range(3):
        lengths = [int(n) for n in rng.integers(0, 700, 8)]
        case = paged_case(
            rng,
            lengths,
            heads=8,
            kv_heads=2,
            head_dim=64,
            page_size=16,
            pool="float32",
            columns=44,
            total=8 * 44 + 1,
        )
        check_decode(case, window, "xla", "float32")


def check_prefill(
    rng,
    chunks,
    contexts,
    *,
    shape,
    pool,
    backend,
    window,
    gaps,
    columns=None,
    total=None,
    region=None,
    **more,
):
    heads, kv_heads, head_dim, page_size = shape
    lanes, needed = packed_lanes(rng, chunks, contexts, gaps)
    region = region or needed
    case = paged_case(
        rng,
        [chunk + context if chunk else 0 for chunk, context in zip(chunks, contexts)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        rows=region,
        columns=columns,
        total=total,
        first_page=2,
        share=False,
    )
    options = {"scale": head_dim**-0.5, "window": window, **case.options, **more}
    got = jit_prefill(case.q, case.kv_pages, case.page_table, lanes, backend=backend, **options)
    want = oracle.prefill(case.q, case.kv_pages, case.page_table, lanes, **options)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
    assert not np.asarray(got, np.float32)[~want.any(axis=(1, 2))].any()


@pytest.mark.parametrize(("shape", "pool", "backend"), MATRIX, ids=str)
def test_prefill(shape, pool, backend):
    rng = np.random.default_rng(2)
    page_size = shape[3]
    chunks = [page_size + 1, 0, 1, 2 * page_size, page_size - 1]
    contexts = [0, 7, 3 * page_size - 1, page_size, 5]
    for window, more in ((None, {}), (page_size + 3, extras(shape[0]))):
        check_prefill(
            rng,
            chunks,
            contexts,
            shape=shape,
            pool=pool,
            backend=backend,
            window=window,
            gaps=True,
            **more,
        )


@pytest.mark.parametrize("window", [None, 1, 100])
def test_prefill_long_ragged(window):
    rng = np.random.default_rng(3)
    for _ in range(2):
        chunks = [int(n) for n in rng.integers(0, 200, 5)]
        contexts = [int(n) for n in rng.integers(0, 300, 5)]
        check_prefill(
            rng,
            chunks,
            contexts,
            shape=(4, 2, 32, 16),
            pool="float32",
            backend="xla",
            window=window,
            gaps=True,
            columns=33,
            total=5 * 33 + 1,
            region=5 * 203 + 3,
        )


def test_idle_rows_give_zeros():
    pool = jnp.full((4, 16, 2, 2, 32), jnp.nan)
    q = jnp.ones((5, 4, 32))
    idle = jnp.zeros(5, jnp.int32)
    table = jnp.zeros((5, 2), jnp.int32)
    for backend in BACKENDS:
        for window in (None, 4) if backend == "xla" else (None,):
            out = jit_decode(q, pool, table, idle, scale=1.0, window=window, backend=backend)
            assert not np.asarray(out).any()
            lanes = PrefillLanes(idle, idle, idle)
            out = jit_prefill(q, pool, table, lanes, scale=1.0, window=window, backend=backend)
            assert not np.asarray(out).any()


def test_more_query_precision_than_pool_is_accepted():
    rng = np.random.default_rng(4)
    case = paged_case(rng, [40, 17], heads=4, kv_heads=2, head_dim=64, page_size=16, pool="uint16")
    case = case._replace(q=case.q.astype(jnp.float32))
    check_decode(case, None, "xla", "uint16")


@pytest.mark.parametrize("query", ["float16", "float32"])
def test_one_scale_for_the_whole_pool(query):
    rng = np.random.default_rng(5)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16}
    for pool in ("int8", "uint8"):
        case = paged_case(rng, [40, 17, 0], pool=pool, per_page=False, query=query, **shape)
        check_decode(case, None, "xla", query)


def loop_steps(function, *operands) -> int:
    """Steps of page blocks that a call makes, counted by a callback in the gather."""
    steps = 0

    def count(_):
        nonlocal steps
        steps += 1

    from pallas_kernels.paged_attention import xla, xla_prefill

    original = xla.gather_pages

    def counted(kv_pages, ids):
        jax.debug.callback(count, ids[..., :1])
        return original(kv_pages, ids)

    jax.clear_caches()  # the traces of other tests do not count
    try:
        xla.gather_pages = xla_prefill.gather_pages = counted
        jax.block_until_ready(jax.jit(lambda *a: function(*a))(*operands))
        jax.effects_barrier()
    finally:
        xla.gather_pages = xla_prefill.gather_pages = original
        jax.clear_caches()
    return steps


def test_cost_follows_live_tokens_not_the_table():
    pool = jnp.zeros((3, 16, 2, 1, 16))
    q = jnp.ones((512, 2, 16))
    table = jnp.zeros((4, 512), jnp.int32)
    decode = functools.partial(paged_decode_attention, scale=1.0, backend="xla")
    prefill = functools.partial(paged_prefill_attention, scale=1.0, backend="xla")
    lengths = jnp.array([0, 10, 300, 0], jnp.int32)
    assert loop_steps(decode, q[:4], pool, table, lengths) == 5  # 300 tokens in blocks of 64
    windowed = functools.partial(decode, window=40)
    late = jnp.array([0, 0, 300, 290], jnp.int32)
    assert loop_steps(windowed, q[:4], pool, table, late) == 2  # tokens 250 .. 299
    idle = jnp.zeros(4, jnp.int32)
    assert loop_steps(decode, q[:4], pool, table, idle) == 0
    lanes = PrefillLanes(
        start=jnp.array([0, 65, 0, 0], jnp.int32),
        length=jnp.array([65, 3, 0, 0], jnp.int32),
        context=jnp.array([0, 128, 4000, 0], jnp.int32),
    )
    # lane 0: rows 0..63 see one block, row 64 two; lane 1: 131 tokens, three blocks
    assert loop_steps(prefill, q, pool, table, lanes) == 1 + 2 + 3

"""The Triton prefill kernel: in Pallas' interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelError, PrefillLanes, paged_prefill_attention
from pallas_kernels.paged_attention import triton_prefill
from pallas_kernels.tuning import PrefillTuning
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import packed_lanes, paged_case

SMALL = PrefillTuning(tile_rows=32, block_tokens=16)

# heads, kv_heads, head_dim, page size, type, options
QUICK = [
    (2, 1, 16, 8, "float32", {}),
    (3, 1, 80, 8, "float32", {"window": 17, "sinks": True, "soft_cap": 2.0}),
]
MORE = [
    (2, 2, 64, 32, "float8_e4m3fn", {}),
    (4, 2, 64, 16, "bfloat16", {}),
    (20, 1, 96, 64, "float16", {"soft_cap": 20.0}),
    (8, 1, 256, 16, "bfloat16", {"window": 1}),
    (8, 2, 128, 128, "int8", {"window": 50, "sinks": True, "per_page": False}),
    (8, 2, 64, 16, "int8", {"query": "float16"}),
    (4, 4, 64, 16, "uint8", {"query": "float32", "sinks": True}),
    (16, 2, 128, 32, "uint16", {"window": 40}),
    (64, 1, 64, 16, "float32", {}),
]


def problem(rng, chunks, contexts, shape, region=None, **fixed):
    """A case, its lanes, and the options of the call."""
    heads, kv_heads, head_dim, page_size, pool, options = shape
    options = dict(options)
    made = {name: options.pop(name) for name in ("per_page", "query") if name in options}
    lanes, rows = packed_lanes(rng, chunks, contexts, gaps=True)
    case = paged_case(
        rng,
        [chunk + context if chunk else 0 for chunk, context in zip(chunks, contexts)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        rows=region or rows,
        first_page=3,
        **made,
        **fixed,
    )
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    return case, lanes, {"scale": head_dim**-0.5, **options, **case.options}


def interpreted(case, lanes, **options):
    return paged_prefill_attention(
        *case[:3], lanes, backend="triton", tuning=SMALL, interpret=True, **options
    )


def check(case, lanes, pool, options):
    got = interpreted(case, lanes, **options)
    want = oracle.prefill(*case[:3], lanes, **options)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
    unowned = np.ones(case.q.shape[0], bool)
    for start, length, _ in zip(*(np.asarray(part) for part in lanes)):
        unowned[start : start + length] = False
    assert not np.asarray(got, np.float32)[unowned].any()


def check_shape(shape, seed):
    page_size = shape[3]
    chunks = [page_size, 1, 0, 2 * page_size + 3, page_size - 1]
    contexts = [0, 3 * page_size - 1, 7, page_size + 5, 1]
    case, lanes, options = problem(np.random.default_rng(seed), chunks, contexts, shape)
    check(case, lanes, shape[4], options)


@pytest.mark.parametrize("shape", QUICK, ids=str)
def test_ragged_chunks(shape):
    """Chunks around a page, with and without a context; NaN wherever nobody may look."""
    check_shape(shape, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MORE, ids=str)
def test_ragged_chunks_of_more_shapes(shape):
    check_shape(shape, seed=1)


@pytest.mark.slow
def test_random_chunks():
    """Any packing of the region, whole tiles and rests, idle lanes, rows that no lane owns."""
    shape = (4, 2, 64, 16, "float32", {})
    for seed in range(8):
        rng = np.random.default_rng(seed)
        chunks = [int(chunk) for chunk in rng.integers(0, 30, 4)]
        contexts = [int(context) for context in rng.integers(0, 70, 4)]
        case, lanes, options = problem(
            rng, chunks, contexts, shape, region=140, columns=8, total=40
        )
        check(case, lanes, "float32", options)


@pytest.mark.parametrize("tile", [1, 8, 42])
def test_work_items_cover_every_row_of_every_lane_once(tile):
    rng, region = np.random.default_rng(tile), 100
    items = jax.jit(triton_prefill.work_items, static_argnames=("region", "tile"))
    for chunks in ([0, 0, 0], [1, 0, 5], [8, 16, 3], [42, 1, 43], [0, 0, 85]):
        contexts = [int(context) for context in rng.integers(0, 100, 3)]
        lanes, used = packed_lanes(rng, chunks, contexts, gaps=True)
        assert used <= region
        lanes = PrefillLanes(*(np.asarray(part) for part in lanes))
        work = np.asarray(items(*lanes, region=region, tile=tile))
        covered = []
        for lane, first_row, rows, position in work:
            assert 0 <= lane < 3 and 0 <= rows <= tile
            assert rows == 0 or position - first_row == contexts[lane] - lanes.start[lane]
            covered += [(int(lane), row) for row in range(first_row, first_row + rows)]
        owned = [
            (lane, row)
            for lane, (start, length) in enumerate(zip(lanes.start, lanes.length))
            for row in range(int(start), int(start + length))
        ]
        assert sorted(covered) == sorted(owned)


def operands(heads=8, kv_heads=2, head_dim=64, page_size=16, pool=jnp.bfloat16, pages=4096):
    shape = jax.ShapeDtypeStruct
    lane = shape((4,), jnp.int32)
    return (
        shape((256, heads, head_dim), jnp.bfloat16),
        shape((pages, page_size, 2, kv_heads, head_dim), pool),
        shape((4, 64), jnp.int32),
        PrefillLanes(lane, lane, lane),
    )


def prefill(*given, **options):
    return paged_prefill_attention(*given, scale=0.1, backend="triton", **options)


def test_lowers_for_an_a100_without_a_gpu():
    """e4m3 pages, for which an A100 has no instructions, with every option."""

    def call(scale, sinks, *given):
        return prefill(*given, k_scale=scale, v_scale=scale, sinks=sinks, window=100, soft_cap=30.0)

    scale, sinks = (
        jax.ShapeDtypeStruct((4096, 2), jnp.float32),
        jax.ShapeDtypeStruct((8,), "float32"),
    )
    device = AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(call).trace(scale, sinks, *operands(pool=jnp.float8_e4m3fn))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.slow
def test_runs_under_shard_map():
    rng = np.random.default_rng(5)
    shape = (4, 2, 64, 16, "float32", {})
    case, lanes, options = problem(rng, [17, 0, 5], [3, 0, 40], shape)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    heads, pages = P(None, "model"), P(None, None, None, "model")
    sharded = jax.shard_map(
        lambda *given: interpreted(given[:3], given[3], **options),
        mesh=mesh,
        in_specs=(heads, pages, P(), P()),
        out_specs=heads,
        check_vma=False,  # Pallas' interpreter does not keep the axes
    )
    got = sharded(*case[:3], lanes)
    want = oracle.prefill(*case[:3], lanes, **options)
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE["float32"]


def test_lowers_under_shard_map():
    """Manual mesh axes are checked: the kernel says over which axes its result varies."""
    mesh = AbstractMesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads, pages = P(None, "model"), P(None, None, None, "model")
    given = operands()
    sharded = jax.shard_map(prefill, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads)
    assert jax.eval_shape(sharded, *given).shape == given[0].shape


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ({"head_dim": 512}, "head_dim"),
        ({"page_size": 24}, "page_size"),
        ({"heads": 65, "kv_heads": 1}, "heads / kv_heads"),
    ],
    ids=str,
)
def test_uncovered_shapes_are_refused_by_name(shape, field):
    given = operands(**shape)
    with pytest.raises(KernelError, match="triton backend takes") as caught:
        jax.eval_shape(prefill, *given)
    assert caught.value.field == field
    assert str(given[1].shape) in str(caught.value)


@pytest.mark.parametrize("field", ["tile_rows", "block_tokens"])
def test_tiles_are_powers_of_two(field):
    with pytest.raises(KernelError, match=f"tuning.{field}=48"):
        jax.eval_shape(
            lambda *given: prefill(*given, tuning=PrefillTuning(**{field: 48})), *operands()
        )

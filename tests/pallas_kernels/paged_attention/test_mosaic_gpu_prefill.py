"""The Hopper prefill kernel: in JAX's interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelError, PrefillLanes, paged_prefill_attention
from pallas_kernels.compat import mosaic_gpu_interpreter
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.coverage import mosaic_gpu_prefill as refusal_of
from pallas_kernels.paged_attention import mosaic_gpu_prefill
from pallas_kernels.paged_attention.hopper_prefill.layout import Geometry, geometry
from pallas_kernels.tuning import PrefillTuning
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import EIGHT_BITS, packed_lanes, paged_case

INTERPRETER = mosaic_gpu_interpreter()
needs_interpreter = pytest.mark.skipif(
    INTERPRETER is None,
    reason=f"jax {jax.__version__} cannot interpret Mosaic GPU kernels (0.11 can): "
    "the prefill kernel's RESULTS are not tested here, only that it lowers",
)
SMALL_BLOCKS = PrefillTuning(block_tokens=64, stages=2)


def check(
    chunks,
    contexts,
    *,
    heads,
    kv_heads,
    head_dim,
    page_size,
    pool="bfloat16",
    seed=0,
    tuning=None,
    interpreter=None,
    **options,
):
    """Lanes in random order with gaps, shared pages, NaN wherever nobody may look."""
    held = {name: options.pop(name) for name in ("per_page", "query") if name in options}
    rng = np.random.default_rng(seed)
    lanes, region = packed_lanes(rng, chunks, contexts, gaps=True)
    case = paged_case(
        rng,
        [context + chunk if chunk else 0 for chunk, context in zip(chunks, contexts)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        rows=region,
        first_page=3,
        **held,
    )
    if options.get("window"):
        case = without_unseen(case, chunks, contexts, page_size, options["window"], pool)
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    options |= {"scale": head_dim**-0.5, **case.options}
    got = paged_prefill_attention(
        *case[:3],
        lanes,
        backend="mosaic_gpu",
        tuning=tuning,
        interpret=INTERPRETER(**(interpreter or {})),
        **options,
    )
    want = oracle.prefill(*case[:3], lanes, **options)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
    assert not np.asarray(got, np.float32)[(want == 0.0).all(axis=(1, 2))].any()


def without_unseen(case, chunks, contexts, page_size, window, pool):
    """The case with every page that no row's window reaches made NaN, its scales too."""
    table = np.asarray(case.page_table)
    seen = np.zeros(case.kv_pages.shape[0], bool)
    for lane, (chunk, context) in enumerate(zip(chunks, contexts)):
        for token in range(max(0, context + 1 - window), context + chunk if chunk else 0):
            seen[case.first_page + table[lane, token // page_size]] = True
    pages = np.array(case.kv_pages)
    if pool != "int8":
        pages[~seen] = np.nan
    scales = {
        name: jnp.where(seen[:, None], scale, jnp.nan) if scale.ndim else scale
        for name, scale in case.scales.items()
    }
    return case._replace(kv_pages=jnp.asarray(pages), scales=scales)


@needs_interpreter
def test_chunks_of_all_sizes():
    """Lanes of no row, one row, and around a page and a tile; contexts inside a page."""
    check([17, 0, 65, 1, 16], [40, 0, 3, 15, 113], heads=2, kv_heads=1, head_dim=64, page_size=16)


@needs_interpreter
def test_all_options_at_once():
    """Four heads of each KV head packed in a tile, a window that begins inside a page, and a ring
    that is used several times over."""
    check(
        [33, 3, 15],
        [211, 100, 0],
        heads=8,
        kv_heads=2,
        head_dim=80,
        page_size=32,
        window=90,
        soft_cap=3.0,
        sinks=True,
        tuning=SMALL_BLOCKS,
    )


@needs_interpreter
def test_8_bit_pages_with_a_scale_each():
    """Scales differ inside a block; a window begins inside a page; two KV heads."""
    check(
        [33, 9],
        [211, 100],
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        pool="float8_e4m3fn",
        window=90,
        sinks=True,
    )


@needs_interpreter
def test_8_bit_pages_with_one_scale():
    check(
        [20, 1],
        [100, 150],
        heads=4,
        kv_heads=1,
        head_dim=80,
        page_size=128,
        pool="int8",
        per_page=False,
        query="float16",
        soft_cap=3.0,
        tuning=SMALL_BLOCKS,
    )


@needs_interpreter
@pytest.mark.parametrize("pool", ["bfloat16", "float8_e4m3fn"])
def test_no_data_race(pool, capfd):
    """More blocks than stages, rows that leave through the memory of the 8-bit numbers."""
    check(
        [9, 20],
        [250, 30],
        heads=2,
        kv_heads=1,
        head_dim=64,
        page_size=64,
        window=250,
        pool=pool,
        tuning=SMALL_BLOCKS,
        interpreter={"detect_races": True},
    )
    assert "race" not in "".join(capfd.readouterr()).lower()


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 3, "kv_heads": 1, "head_dim": 128, "page_size": 128, "pool": "float16"},
        {"heads": 16, "kv_heads": 1, "head_dim": 96, "page_size": 32, "window": 1},
        # half a page a block
        {"heads": 8, "kv_heads": 1, "head_dim": 256, "page_size": 128, "soft_cap": 5.0},
        {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 32, "pool": "int8"},
        {"heads": 3, "kv_heads": 1, "head_dim": 96, "page_size": 16, "pool": "float8_e4m3fn"},
        {"heads": 2, "kv_heads": 1, "head_dim": 256, "page_size": 64, "pool": "int8", "window": 70},
    ],
    ids=str,
)
def test_shapes(shape):
    check([21, 1, 0, 8], [shape["page_size"] - 1, 150, 0, 5], seed=1, **shape)


@needs_interpreter
@pytest.mark.slow
def test_random_lanes():
    rng = np.random.default_rng(0)
    chunks = [int(rng.choice([0, 1, 7, 15, 16, 17, 40])) for _ in range(5)]
    contexts = [int(rng.integers(0, 200)) for _ in chunks]
    shape = {"heads": 4, "kv_heads": 1, "head_dim": 64, "page_size": 16}
    check(chunks, contexts, window=77, tuning=SMALL_BLOCKS, **shape)


@pytest.mark.parametrize(
    ("group", "heads", "rows", "tile_heads", "tile_rows"),
    [
        (1, 1, 64, 1, 128),
        (2, 1, 64, 2, 64),
        (3, 1, 64, 1, 128),
        (4, 2, 32, 4, 32),
        (6, 1, 64, 2, 64),
        (8, 4, 16, 8, 16),
        (16, 8, 8, 16, 8),
        (48, 8, 8, 16, 8),
    ],
)
def test_the_query_heads_of_a_kv_head_share_a_tile(group, heads, rows, tile_heads, tile_rows):
    packing = geometry(group)
    assert packing == Geometry(heads, rows, split_heads=group % 2 == 0)
    assert (packing.tile_heads, packing.tile_rows) == (tile_heads, tile_rows)
    assert group % tile_heads == 0


def test_blocks_and_stages_fit_shared_memory():
    fitted, largest = mosaic_gpu_prefill.fitted, mosaic_gpu_prefill.DEFAULT
    for head_dim in (64, 80, 96, 128, 256):
        for pool in ("bfloat16", "int8"):
            sizes = fitted(largest, head_dim, pool)
            used = mosaic_gpu_prefill.shared_bytes(head_dim, *sizes)
            assert used <= mosaic_gpu_prefill.SHARED_MEMORY
            assert sizes[0] == (64 if head_dim == 256 else 128)
            assert sizes[1] >= 2
            assert (sizes[2] > 0) == (pool == "int8")
    assert fitted(SMALL_BLOCKS, 64, "bfloat16") == (64, 2, 0)
    assert fitted(SMALL_BLOCKS, 64, "float8_e4m3fn") == (64, 2, 2)


def lowered_for_cuda(function, operands) -> str:
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def prefill(q, kv_pages, page_table, lanes, *scales, **options):
    options |= {"scale": 0.1, "backend": "mosaic_gpu", **dict(zip(("k_scale", "v_scale"), scales))}
    return paged_prefill_attention(q, kv_pages, page_table, lanes, **options)


def prefill_operands(heads, kv_heads, head_dim, page_size, dtype):
    shape = jax.ShapeDtypeStruct
    lane = shape((4,), jnp.int32)
    quantized = jnp.dtype(dtype).name in EIGHT_BITS
    scales = [shape((4096, kv_heads), jnp.float32)] * 2 if quantized else []
    return (
        shape((250, heads, head_dim), jnp.bfloat16 if quantized else dtype),
        shape((4096, page_size, 2, kv_heads, head_dim), dtype),
        shape((4, 64), jnp.int32),
        PrefillLanes(lane, lane, lane),
        *scales,
    )


@pytest.mark.parametrize("pool", [jnp.bfloat16, jnp.int8])
def test_lowers_for_cuda_without_a_gpu(pool):
    assert "mosaic_gpu" in lowered_for_cuda(prefill, prefill_operands(8, 8, 64, 64, pool))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((32, 8, 128, 16, jnp.float16), {"window": 100}),
        ((6, 2, 80, 32, jnp.bfloat16), {"tuning": SMALL_BLOCKS}),
        ((6, 2, 80, 32, jnp.float8_e4m3fn), {"soft_cap": 30.0}),
        ((8, 2, 256, 16, jnp.int8), {}),
    ],
    ids=str,
)
def test_shapes_lower_for_cuda(shape, options):
    call = functools.partial(prefill, **options)
    assert "mosaic_gpu" in lowered_for_cuda(call, prefill_operands(*shape))


def test_traces_under_shard_map():
    """Manual mesh axes are checked: the kernel says over which axes its results vary."""
    mesh = AbstractMesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads, pages = P(None, "model"), P(None, None, None, "model")

    def sharded(*operands):
        specs = (heads, pages, P(), P())
        return jax.shard_map(prefill, mesh=mesh, in_specs=specs, out_specs=heads)(*operands)

    operands = prefill_operands(8, 2, 64, 16, jnp.bfloat16)
    assert jax.eval_shape(sharded, *operands).shape == operands[0].shape


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ((4, 2, 48, 16, jnp.bfloat16), "head_dim"),
        ((4, 2, 64, 16, jnp.float32), "kv_pages.dtype"),
        ((4, 2, 64, 8, jnp.bfloat16), "page_size"),
    ],
    ids=str,
)
def test_uncovered_shapes_are_refused_by_name(shape, field):
    operands = prefill_operands(*shape)
    with pytest.raises(KernelError, match=f"{field}=.*mosaic_gpu backend takes") as caught:
        jax.eval_shape(prefill, *operands)
    assert caught.value.field == field
    assert str(operands[1].shape) in str(caught.value)


def test_query_and_pages_have_one_type():
    q, *others = prefill_operands(4, 2, 64, 16, jnp.bfloat16)
    with pytest.raises(KernelError, match=r"q\.dtype=float32"):
        jax.eval_shape(prefill, jax.ShapeDtypeStruct(q.shape, jnp.float32), *others)


@pytest.mark.parametrize("pool", ["uint8", "uint16", "float32"])
def test_other_pools_are_refused(pool):
    refusal = refusal_of(AttentionShape(pool_dtype=jnp.dtype(pool)))
    assert refusal is not None
    assert refusal.field == "kv_pages.dtype"


def test_covered_shapes_are_not_refused():
    assert refusal_of(AttentionShape(head_dim=80, page_size=128, group=65)) is None
    eight_bits = AttentionShape(pool_dtype=jnp.dtype("int8"), query_dtype=jnp.dtype("float16"))
    assert refusal_of(eight_bits) is None


@pytest.mark.parametrize(
    ("field", "tuning"),
    [
        ("tuning.block_tokens", PrefillTuning(block_tokens=96)),
        ("tuning.stages", PrefillTuning(stages=1)),
        ("tuning", PrefillTuning(consumers=1)),
        ("tuning", PrefillTuning(tile_rows=256)),
    ],
)
def test_an_impossible_tuning_is_refused(field, tuning):
    operands = prefill_operands(4, 2, 64, 16, jnp.bfloat16)
    with pytest.raises(KernelError) as caught:
        jax.eval_shape(functools.partial(prefill, tuning=tuning), *operands)
    assert caught.value.field == field

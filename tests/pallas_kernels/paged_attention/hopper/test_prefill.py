"""The Hopper prefill kernel: in JAX's interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelError, PrefillLanes, paged_prefill_attention
from pallas_kernels.backends.mosaic_gpu import HopperPrefillTuning
from pallas_kernels.backends.mosaic_gpu import covers_prefill as refusal_of
from pallas_kernels.backends.triton import TritonPrefillTuning
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.paged_attention.hopper import prefill as mosaic_gpu_prefill
from pallas_kernels.paged_attention.hopper.prefill_plan import Geometry, geometry
from tests.absent_devices import HOPPER_INTERPRETER, needs_hopper_interpreter
from tests.pallas_kernels.cases import EIGHT_BITS
from tests.pallas_kernels.lowering import lowered_for_cuda
from tests.pallas_kernels.paged_attention.checks import check_prefill
from tests.pallas_kernels.strategies import Lanes, Program, examples, lanes

SMALL_BLOCKS = HopperPrefillTuning(block_tokens=64, stages=2)


def call(tuning=None, **interpreter):
    """The backend and its options; the interpreter exists in some versions of JAX only."""
    return {
        "backend": "mosaic_gpu",
        "tuning": tuning,
        "interpret": HOPPER_INTERPRETER(**interpreter),
    }


QUICK = [
    (None, Program(2, 1, 64, 16, "bfloat16", columns=9, rows=5, chunk=30)),
    (
        SMALL_BLOCKS,
        Program(
            8,
            2,
            80,
            32,
            "float16",
            window=90,
            soft_cap=3.0,
            sinks=True,
            columns=8,
            rows=3,
            chunk=33,
        ),
    ),
    # a window begins inside a page
    (
        None,
        Program(
            4,
            2,
            64,
            16,
            "float8_e4m3fn",
            per_token=False,
            window=90,
            sinks=True,
            columns=14,
            rows=2,
            chunk=33,
        ),
    ),
    (
        SMALL_BLOCKS,
        Program(
            4,
            1,
            80,
            128,
            "int8",
            per_token=False,
            query="float16",
            soft_cap=3.0,
            columns=2,
            rows=2,
            chunk=20,
        ),
    ),
]
MORE = [
    (None, Program(3, 1, 128, 128, "float16", columns=2, rows=4, chunk=21)),
    (None, Program(16, 1, 96, 32, "bfloat16", window=1, rows=4, chunk=21)),
    # half a page a block
    (None, Program(8, 1, 256, 128, "bfloat16", soft_cap=5.0, columns=2, rows=4, chunk=21)),
    (SMALL_BLOCKS, Program(4, 1, 64, 16, "bfloat16", window=77, columns=15, rows=5)),
    (None, Program(8, 2, 128, 32, "int8", per_token=False, columns=6, rows=4, chunk=21)),
    (None, Program(3, 1, 96, 16, "float8_e4m3fn", per_token=False, columns=12, rows=4, chunk=21)),
    (None, Program(2, 1, 256, 64, "int8", per_token=False, window=70, columns=4, rows=4, chunk=21)),
]


@needs_hopper_interpreter
@pytest.mark.parametrize(
    ("tuning", "program"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda value: str(value) if isinstance(value, Program) else "",
)
@examples(2)
@given(data=st.data())
def test_ragged(tuning, program, data):
    """Chunks around a page, contexts inside one, and a ring that is used several times over."""
    check_prefill(program, data.draw(lanes(program)), **call(tuning))


@needs_hopper_interpreter
@pytest.mark.parametrize("pool", ["bfloat16", "float8_e4m3fn"])
def test_no_data_race(pool, capfd):
    """More blocks than stages, rows that leave through the memory of the 8-bit numbers."""
    program = Program(2, 1, 64, 64, pool, per_token=False, window=250, rows=2, chunk=20)
    ragged = Lanes([9, 20], [250, 30], {}, stale=True, seed=0)
    check_prefill(program, ragged, **call(SMALL_BLOCKS, detect_races=True))
    assert "race" not in "".join(capfd.readouterr()).lower()


@pytest.mark.parametrize(
    ("group", "heads", "rows", "tile_heads", "tile_rows"),
    [
        (1, 1, 64, 1, 128),
        (2, 1, 64, 2, 64),
        (3, 1, 64, 1, 128),
        (4, 2, 32, 4, 32),
        (6, 1, 64, 2, 64),
        (8, 4, 16, 8, 16),
        (16, 4, 16, 8, 16),
        (48, 4, 16, 8, 16),
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


def prefill(q, kv_pages, page_table, lanes, *scales, **options):
    options |= {"scale": 0.1, "backend": "mosaic_gpu", **dict(zip(("k_scale", "v_scale"), scales))}
    return paged_prefill_attention(q, kv_pages, page_table, lanes, **options)


def prefill_operands(heads, kv_heads, head_dim, page_size, dtype):
    shape = jax.ShapeDtypeStruct
    lane = shape((4,), jnp.int32)
    quantized = jnp.dtype(dtype).name in EIGHT_BITS
    scales = [shape((), jnp.float32)] * 2 if quantized else []
    return (
        shape((250, heads, head_dim), jnp.bfloat16 if quantized else dtype),
        shape((4096, page_size, 2, kv_heads, head_dim), dtype),
        shape((4, 64), jnp.int32),
        PrefillLanes(lane, lane, lane),
        *scales,
    )


@pytest.mark.parametrize(
    ("head_dim", "pool"),
    [
        (64, jnp.int8),
        (80, jnp.float16),
        pytest.param(64, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(96, jnp.int8, marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda_without_a_gpu(head_dim, pool):
    operands = prefill_operands(8, 8, head_dim, 64, pool)
    assert "mosaic_gpu" in lowered_for_cuda(prefill, *operands).as_text()


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
    run = functools.partial(prefill, **options)
    assert "mosaic_gpu" in lowered_for_cuda(run, *prefill_operands(*shape)).as_text()


def test_traces_under_shard_map():
    """Manual mesh axes that are not checked: JAX cannot map warps where they are."""
    mesh = AbstractMesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads, pages = P(None, "model"), P(None, None, None, "model")

    def sharded(*operands):
        specs = (heads, pages, P(), P())
        return jax.shard_map(prefill, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(
            *operands
        )

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
        ("tuning.block_tokens", HopperPrefillTuning(block_tokens=96)),
        ("tuning.stages", HopperPrefillTuning(stages=1)),
        ("tuning", TritonPrefillTuning()),
    ],
)
def test_an_impossible_tuning_is_refused(field, tuning):
    operands = prefill_operands(4, 2, 64, 16, jnp.bfloat16)
    with pytest.raises(KernelError) as caught:
        jax.eval_shape(functools.partial(prefill, tuning=tuning), *operands)
    assert caught.value.field == field

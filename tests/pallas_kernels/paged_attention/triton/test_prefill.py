"""The Triton prefill kernel: in Pallas' interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelError, PrefillLanes, paged_prefill_attention
from pallas_kernels.backends.triton import TritonPrefillTuning
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import packed_lanes, paged_case
from tests.pallas_kernels.lowering import A100, lowered_for_cuda
from tests.pallas_kernels.paged_attention.checks import check_prefill
from tests.pallas_kernels.strategies import Program, examples, lanes, programs

CALL = {
    "backend": "triton",
    "tuning": TritonPrefillTuning(tile_rows=32, block_tokens=16),
    "interpret": True,
}
ALL = {"soft_cap": 2.0, "sinks": True}

QUICK = [
    Program(3, 1, 80, 8, "float32", window=17, edge=16, **ALL),
]
MORE = [
    Program(2, 1, 16, 8, "float32", edge=16),
    Program(2, 2, 64, 32, "float8_e4m3fn"),
    Program(4, 2, 64, 16, "bfloat16"),
    Program(20, 1, 96, 64, "float16", soft_cap=20.0, chunk=70),
    Program(8, 1, 256, 16, "bfloat16", window=1),
    Program(8, 2, 128, 128, "int8", window=50, sinks=True, per_token=False, columns=2, rows=3),
    Program(8, 2, 64, 16, "int8", query="float16"),
    Program(4, 4, 64, 16, "uint8", query="float32", sinks=True),
    Program(16, 2, 128, 32, "uint16", window=40, rows=3),
    Program(64, 1, 64, 16, "float32", rows=3),
]
DRAWN = programs(
    pools=("float32", "bfloat16", "float16", "int8", "uint8", "uint16", "float8_e4m3fn"),
    head_dims=(16, 64, 80, 128),
    page_sizes=(8, 16, 32),
    rows=4,
)


@pytest.mark.parametrize(
    "program", [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in MORE)], ids=str
)
@pytest.mark.usefixtures("poison_outside")
@examples(4)
@given(data=st.data())
def test_ragged(program, data):
    check_prefill(program, data.draw(lanes(program)), **CALL)


@pytest.mark.slow
@pytest.mark.usefixtures("poison_outside")
@examples(6)
@given(data=st.data())
def test_ragged_of_any_shape(data):
    program = data.draw(DRAWN)
    check_prefill(program, data.draw(lanes(program)), **CALL)


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
        jax.ShapeDtypeStruct((4096, 2, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), "float32"),
    )
    given = operands(pool=jnp.float8_e4m3fn)
    text = lowered_for_cuda(call, scale, sinks, *given, device=A100).as_text()
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.slow
def test_runs_under_shard_map():
    rng = np.random.default_rng(5)
    packed, region = packed_lanes(rng, [17, 0, 5], [3, 0, 40], gaps=True)
    case = paged_case(
        rng,
        [20, 0, 45],
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        pool="float32",
        rows=region,
    )
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    heads, pages = P(None, "model"), P(None, None, None, "model")
    sharded = jax.shard_map(
        functools.partial(paged_prefill_attention, scale=0.125, **CALL),
        mesh=mesh,
        in_specs=(heads, pages, P(), P()),
        out_specs=heads,
        check_vma=False,  # Pallas' interpreter does not keep the axes
    )
    want = oracle.prefill(*case[:3], packed, scale=0.125)
    assert oracle.relative_error(sharded(*case[:3], packed), want) <= oracle.TOLERANCE["float32"]


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
            lambda *given: prefill(*given, tuning=TritonPrefillTuning(**{field: 48})), *operands()
        )

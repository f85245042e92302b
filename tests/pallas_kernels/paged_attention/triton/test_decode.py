"""The Triton decode kernel: in Pallas' interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from pallas_kernels import KernelError, paged_decode_attention
from pallas_kernels.backends.triton import TritonDecodeTuning
from pallas_kernels.paged_attention.queries import key_range
from pallas_kernels.paged_attention.triton import decode as triton_decode
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import paged_case
from tests.pallas_kernels.lowering import A100, lowered_for_cuda
from tests.pallas_kernels.paged_attention.checks import check_decode, check_queries_as_rows
from tests.pallas_kernels.strategies import Program, examples, programs, slots

SMALL = TritonDecodeTuning(block_tokens=16)
CALL = {"backend": "triton", "tuning": SMALL, "interpret": True}
ALL = {"soft_cap": 2.0, "sinks": True}

QUICK = [
    Program(3, 1, 80, 8, "float8_e4m3fn", splits=7, window=17, edge=16, **ALL),
]
# every pool, and 1, 2 and 7 splits: also more than a slot has blocks, and pages smaller than those
MORE = [
    Program(4, 2, 64, 16, "bfloat16", splits=2),
    Program(3, 1, 80, 8, "float32", splits=1, window=17, sinks=True),
    Program(2, 2, 64, 32, "float8_e4m3fn", splits=2),
    Program(20, 1, 96, 64, "float16", splits=7, soft_cap=20.0),
    Program(8, 1, 256, 16, "bfloat16", splits=1, window=1),
    Program(8, 2, 128, 128, "int8", splits=2, window=50, sinks=True, per_token=False, columns=2),
    Program(8, 2, 64, 16, "int8", splits=1, query="float16"),
    Program(4, 4, 64, 16, "uint8", splits=2, query="float32", sinks=True),
    Program(16, 2, 128, 32, "uint16", splits=7, window=40),
    Program(4, 1, 256, 8, "float32", splits=7, soft_cap=5.0, columns=20),
]
# several queries: one tile and several, one split and more than some queries see
SEVERAL = [
    Program(6, 2, 64, 16, "bfloat16", splits=3, window=21, queries=3, **ALL),
    Program(4, 2, 64, 16, "float32", splits=1, queries=8, sinks=True),
    Program(20, 2, 80, 8, "float8_e4m3fn", splits=7, window=5, queries=8, **ALL),
    Program(8, 2, 128, 32, "float32", splits=2, queries=5, soft_cap=3.0, rows=4),
    Program(8, 2, 128, 128, "int8", splits=2, window=50, per_token=False, columns=2, queries=2),
    Program(4, 4, 64, 16, "uint16", splits=7, queries=5),
]
DRAWN = programs(
    pools=("float32", "bfloat16", "float16", "int8", "uint8", "uint16", "float8_e4m3fn"),
    head_dims=(16, 64, 80, 128),
    page_sizes=(8, 16, 32),
    splits=(1, 2, 7),
    queries=(1, 1, 2, 5, 8),
)


@pytest.mark.parametrize(
    "program", [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in MORE)], ids=str
)
@pytest.mark.usefixtures("poison_outside")
@examples(4)
@given(data=st.data())
def test_ragged(program, data):
    check_decode(program, data.draw(slots(program)), **CALL)


@pytest.mark.slow
@pytest.mark.parametrize("program", SEVERAL, ids=str)
@pytest.mark.usefixtures("poison_outside")
@examples(4)
@given(data=st.data())
def test_ragged_queries(program, data):
    check_decode(program, data.draw(slots(program)), **CALL)


@pytest.mark.slow
@examples(2)
@given(data=st.data())
def test_several_queries_are_as_many_calls_of_one(data):
    check_queries_as_rows(SEVERAL[0], data.draw(slots(SEVERAL[0])), **CALL)


@pytest.mark.slow
@pytest.mark.usefixtures("poison_outside")
@examples(8)
@given(data=st.data())
def test_ragged_of_any_shape(data):
    program = data.draw(DRAWN)
    tuning = TritonDecodeTuning(block_tokens=data.draw(st.sampled_from((16, 32))))
    check_decode(program, data.draw(slots(program)), **{**CALL, "tuning": tuning})


@pytest.mark.slow
def test_every_e4m3_number_is_read_exactly():
    """One key a token and one value: the output is the value, NaN included."""
    bits = np.arange(256, dtype=np.uint8)
    pool = jnp.asarray(np.tile(bits.reshape(32, 8, 1, 1, 1), (1, 1, 2, 1, 16)))
    table = jnp.arange(32, dtype=jnp.int32)[:, None]
    got = [
        paged_decode_attention(
            jnp.zeros((32, 1, 16), jnp.float32),
            pool,
            table,
            jnp.full((32,), offset + 1, jnp.int32),
            scale=1.0,
            window=1,
            k_scale=jnp.float32(0.0),
            v_scale=jnp.float32(2.0),
            splits=1,
            backend="triton",
            tuning=SMALL,
            interpret=True,
        )
        for offset in range(8)
    ]
    got = np.stack(got, axis=1).reshape(256, 16)
    want = 2.0 * bits.view(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(got, np.tile(want[:, None], (1, 16)))


@pytest.mark.parametrize("count", [None, 0, 1, 5])
def test_splits_share_the_blocks_of_each_slot(count):
    """Every visible block is in one split, and the live splits are the first ones."""
    block = 16
    queries, counts = (1, None) if count is None else (5, jnp.int32(count))
    for splits, length in itertools.product((1, 2, 7), (0, 1, 15, 16, 17, 99, 100, 101, 1000)):
        keys = key_range(jnp.int32(length), counts, queries, window=100)
        seen = []
        for split in range(splits):
            part = triton_decode.split_blocks(keys, jnp.int32(split), block=block, splits=splits)
            begin, end, live = map(int, part)
            assert (begin < end) == (split < live)
            seen += range(begin, end)
        first = length - (1 if count is None else count) + 1 - 100
        visible = 0 if count == 0 else length
        assert seen == list(range(max(first, 0) // block, -(-visible // block)))


def test_the_number_of_splits_fills_the_gpu_and_no_more(monkeypatch):
    monkeypatch.setattr(triton_decode, "multiprocessors", lambda: 108)
    chip = TritonDecodeTuning(waves=2)
    assert triton_decode.number_of_splits(slots=256, kv_heads=8, blocks=64, tuning=chip) == 1
    assert triton_decode.number_of_splits(slots=1, kv_heads=8, blocks=256, tuning=chip) == 27
    assert triton_decode.number_of_splits(slots=1, kv_heads=8, blocks=4, tuning=chip) == 4
    assert triton_decode.number_of_splits(slots=1, kv_heads=1, blocks=999, tuning=chip) == 64


def operands(heads=8, kv_heads=2, head_dim=64, page_size=16, pool=jnp.bfloat16, pages=4096):
    shape = jax.ShapeDtypeStruct
    return (
        shape((16, heads, head_dim), jnp.float32 if pool == jnp.float32 else jnp.bfloat16),
        shape((pages, page_size, 2, kv_heads, head_dim), pool),
        shape((16, 64), jnp.int32),
        shape((16,), jnp.int32),
    )


def decode(*given, **options):
    return paged_decode_attention(*given, scale=0.1, backend="triton", **options)


def triton_kernels(lowered):
    """The Triton modules inside a lowered program, as text."""

    def walk(operation):
        if operation.name == "stablehlo.custom_call":
            parameters = operation.attributes["mhlo.backend_config"]
            with ir.Context() as context:
                dialect.register_dialect(context)
                context.load_all_available_dialects()
                code = ir.StringAttr(parameters["ir"]).value_bytes
                yield ir.Module.parse(code, context).operation.get_asm()
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield from walk(inner.operation)

    yield from walk(lowered.compiler_ir("stablehlo").operation)


@pytest.mark.parametrize(("pages", "bits"), [(2**15, 32), (2**16 + 1, 64)])
def test_a_pool_of_more_than_four_gibibytes_is_addressed_in_64_bits(pages, bits):
    given = operands(kv_heads=8, head_dim=128, pages=pages)
    assert (np.prod(given[1].shape) * 2 > 2**32) == (bits == 64)
    (kernel,) = triton_kernels(
        lowered_for_cuda(lambda *given: decode(*given, splits=1), *given, device=A100)
    )
    assert f"tensor<64x128x!tt.ptr<bf16>>, tensor<64x128xi{bits}>" in kernel, kernel


@pytest.mark.parametrize("splits", [1, 7])
def test_lowers_for_an_a100_without_a_gpu(splits):
    """e4m3 pages too, for which an A100 has no instructions."""

    def call(scale, *given):
        return decode(*given, splits=splits, k_scale=scale, v_scale=scale, window=100)

    scale = jax.ShapeDtypeStruct((4096, 2, 16), jnp.bfloat16)
    text = lowered_for_cuda(call, scale, *operands(pool=jnp.float8_e4m3fn), device=A100).as_text()
    assert text.count("xla.gpu.triton") == min(splits, 2)


@pytest.mark.slow
def test_runs_under_shard_map():
    case = paged_case(
        np.random.default_rng(5),
        [33, 0, 16],
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        pool="float32",
    )
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, pages = P(None, "model"), P(None, None, None, "model")
    sharded = jax.shard_map(
        functools.partial(paged_decode_attention, scale=0.125, splits=2, **CALL),
        mesh=mesh,
        in_specs=(heads, pages, P(), P()),
        out_specs=heads,
        check_vma=False,  # Pallas' interpreter does not keep the axes
    )
    want = oracle.decode(*case[:4], scale=0.125)
    assert oracle.relative_error(sharded(*case[:4]), want) <= oracle.TOLERANCE["float32"]


def test_lowers_under_shard_map():
    """Manual mesh axes are checked: the kernel says over which axes its results vary."""
    mesh = AbstractMesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads, pages = P(None, "model"), P(None, None, None, "model")
    given = operands()
    sharded = jax.shard_map(decode, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads)
    assert jax.eval_shape(sharded, *given).shape == given[0].shape
    heads = P(None, None, "model")
    sharded = jax.shard_map(decode, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads)
    q = jax.ShapeDtypeStruct((16, 5, *given[0].shape[1:]), given[0].dtype)
    assert jax.eval_shape(sharded, q, *given[1:]).shape == q.shape


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ({"head_dim": 512}, "head_dim"),
        ({"page_size": 24}, "page_size"),
        ({"heads": 65, "kv_heads": 1}, "heads / kv_heads"),
        ({"pool": jnp.int8, "pages": 2**19 + 1}, "kv_pages.shape"),
    ],
    ids=str,
)
def test_uncovered_shapes_are_refused_by_name(shape, field):
    given = operands(**shape)
    scales = {}
    if "pool" in shape:
        scales = {name: jnp.float32(1.0) for name in ("k_scale", "v_scale")}
    with pytest.raises(KernelError, match="triton backend takes") as caught:
        jax.eval_shape(lambda *given: decode(*given, **scales), *given)
    assert caught.value.field == field
    assert str(given[1].shape) in str(caught.value)


def test_blocks_are_powers_of_two():
    with pytest.raises(KernelError, match="tuning"):
        jax.eval_shape(lambda *given: decode(*given, tuning=TritonDecodeTuning(48)), *operands())


def test_splits_are_as_many_as_one_tile_merges():
    assert jax.eval_shape(lambda *given: decode(*given, splits=64), *operands())
    with pytest.raises(KernelError, match="splits=65"):
        jax.eval_shape(lambda *given: decode(*given, splits=65), *operands())

"""The Mosaic GPU decode kernel: in JAX's interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelError, paged_decode_attention
from pallas_kernels.backends.mosaic_gpu import HopperDecodeTuning
from pallas_kernels.backends.mosaic_gpu import covers_decode as refusal_of
from pallas_kernels.backends.triton import TritonDecodeTuning
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.paged_attention.hopper import decode as mosaic_gpu_decode
from pallas_kernels.paged_attention.hopper.decode import (
    cut_of,
    default_tuning,
    sharing_of,
    thread_blocks,
)
from pallas_kernels.paged_attention.hopper.decode_work import Cut
from tests.absent_devices import HOPPER_INTERPRETER, needs_hopper_interpreter
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import EIGHT_BITS, paged_case
from tests.pallas_kernels.lowering import lowered_for_cuda
from tests.pallas_kernels.paged_attention.checks import check_decode
from tests.pallas_kernels.strategies import Program, Slots, examples, programs, slots


@contextlib.contextmanager
def chip_of(multiprocessors):
    """In this block kernels are traced for a chip with so many multiprocessors.

    A process without a GPU would count one, which shares the work among two thread blocks.
    """
    with mock.patch.object(mosaic_gpu_decode, "multiprocessors", lambda: multiprocessors):
        yield


@pytest.fixture(autouse=True)
def h200():
    with chip_of(132):
        yield


def call(tuning=None, **interpreter):
    """The backend and its options; the interpreter exists in some versions of JAX only."""
    return {
        "backend": "mosaic_gpu",
        "tuning": tuning,
        "interpret": HOPPER_INTERPRETER(**interpreter),
    }


ALL = {"soft_cap": 2.0, "sinks": True}

# a thread block takes a tenth of a second: few rows, the first of them the longest
QUICK = [
    Program(4, 1, 128, 16, "bfloat16", columns=20, rows=3, queries=3, splits=3, sinks=True),
    Program(6, 2, 80, 32, "int8", per_token=False, columns=7, rows=2, queries=8, window=70),
    Program(4, 1, 128, 16, "bfloat16", columns=9),
    # heads of two, four and eight KV heads lie in one tile of columns
    Program(16, 4, 128, 16, "bfloat16", columns=9, rows=2, splits=3, sinks=True),
    Program(20, 1, 64, 128, "float16", splits=2, window=70, columns=3, rows=3, **ALL),
    Program(6, 2, 80, 32, "bfloat16", splits=7, window=130, columns=7, rows=1, **ALL),
    Program(33, 1, 256, 64, "bfloat16", sinks=True, columns=3, rows=2),
    Program(4, 1, 128, 16, "int8", per_token=False, splits=2, window=33, columns=9, rows=3),
    Program(
        4, 1, 80, 128, "float8_e4m3fn", per_token=False, query="float16", columns=2, rows=2, **ALL
    ),
    Program(16, 1, 64, 32, "float8_e4m3fn", per_token=False, window=290, columns=10, rows=3),
]
MORE = [
    Program(4, 4, 80, 32, "float16", columns=4, rows=2, queries=2, splits=2),
    Program(8, 8, 64, 16, "int8", per_token=False, columns=9, rows=2, splits=3, sinks=True),
    Program(8, 1, 64, 64, "float16", columns=4, rows=4, queries=8, soft_cap=2.0),
    Program(2, 2, 256, 128, "bfloat16", columns=2, rows=3, queries=5, window=100, splits=2),
    Program(4, 1, 96, 16, "float8_e4m3fn", columns=9, rows=3, queries=2, per_token=False),
    Program(5, 1, 96, 64, "float16", splits=2, columns=3),
    Program(6, 2, 80, 32, "bfloat16", splits=7, window=130, columns=7, rows=3, **ALL),
    Program(8, 2, 96, 32, "int8", splits=7, columns=7, rows=3, per_token=False),
    Program(
        3,
        1,
        256,
        64,
        "float8_e4m3fn",
        per_token=False,
        splits=2,
        columns=4,
        window=100,
        query="float16",
    ),
]
DRAWN = programs(
    pools=("bfloat16", "float16", "int8", "float8_e4m3fn"),
    per_token=(False,),
    head_dims=(64, 80, 96, 128, 256),
    page_sizes=(16, 32, 64, 128),
    splits=(1, 2, 7),
    rows=3,
    tokens=320,
    queries=(1, 1, 2, 5, 8),
)


@needs_hopper_interpreter
@pytest.mark.parametrize(
    "program", [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in MORE)], ids=str
)
@examples(2)
@given(data=st.data())
def test_ragged(program, data):
    with chip_of(data.draw(st.sampled_from((132, 1, 3)))):
        check_decode(program, data.draw(slots(program)), **call())


@needs_hopper_interpreter
@pytest.mark.slow
@examples(12)
@given(data=st.data())
def test_ragged_of_any_shape(data):
    program = data.draw(DRAWN)
    with chip_of(data.draw(st.sampled_from((132, 1, 3, 7)))):
        check_decode(program, data.draw(slots(program)), **call())


@needs_hopper_interpreter
@pytest.mark.parametrize("queries", [1, 4])
def test_a_result_never_depends_on_the_batch(queries):
    """The same rows alone, among others and permuted: the same bits; two of them are cut."""
    program = Program(4, 1, 64, 16, "bfloat16", columns=50, rows=4, queries=queries, splits=3)
    counts = None if queries == 1 else [4, 1, 3, 2]
    drawn = Slots([800, 70, 500, 0], {}, stale=True, seed=0, queries=counts)
    case = program.case(drawn, np.random.default_rng(0))
    counts = None if counts is None else np.asarray(counts, np.int32)

    def attended(rows):
        rows = np.asarray(rows)
        lens = {} if counts is None else {"query_lens": jnp.asarray(counts[rows])}
        q, table, lengths = (x[rows] for x in (case.q, case.page_table, case.lengths))
        options = program.options(0) | case.options | lens
        return np.asarray(
            paged_decode_attention(
                q, case.kv_pages, table, lengths, splits=program.splits, **options, **call()
            )
        )

    together = attended([0, 1, 2, 3])
    np.testing.assert_array_equal(attended([3, 2, 1, 0])[::-1], together)
    for row in (0, 2):
        np.testing.assert_array_equal(attended([row])[0], together[row])


@needs_hopper_interpreter
def test_heads_of_one_tile_do_not_touch_each_other():
    """NaN in the queries and so in the scores of one KV head's heads; another's are as without."""
    program = Program(8, 2, 128, 16, "bfloat16", columns=20, rows=2, splits=2, sinks=True)
    case = program.case(Slots([300, 40], {}, stale=True, seed=0), np.random.default_rng(0))
    poisoned = case.q.at[0, 4:].set(jnp.nan).at[1, :4].set(jnp.inf)

    def attended(q):
        options = program.options(0) | case.options
        return np.asarray(
            paged_decode_attention(q, *case[1:4], splits=program.splits, **options, **call())
        )

    got, want = attended(poisoned), attended(case.q)
    np.testing.assert_array_equal(got[0, :4], want[0, :4])
    np.testing.assert_array_equal(got[1, 4:], want[1, 4:])
    assert np.isnan(got[0, 4:]).all()


def test_queries_are_read_as_they_are():
    """Heads of some KV heads fill a tile together; what does not fill one is padded."""
    operands = decode_operands(32, 8, 128, 16, "bfloat16")
    assert "pad" not in str(jax.make_jaxpr(decode)(*operands))
    operands = decode_operands(28, 4, 128, 16, "bfloat16")
    assert "pad" in str(jax.make_jaxpr(decode)(*operands))
    assert [sharing_of(4, 8), sharing_of(2, 8), sharing_of(1, 8), sharing_of(8, 8)] == [2, 4, 8, 1]
    assert [sharing_of(4, 1), sharing_of(2, 6), sharing_of(3, 8), sharing_of(16, 2)] == [1] * 4


@needs_hopper_interpreter
def test_small_scales_of_values_do_not_underflow():
    """Weights times 1e-5 would be subnormal float16 numbers; the result is a normal one."""
    case = paged_case(
        np.random.default_rng(0),
        [100],
        heads=2,
        kv_heads=1,
        head_dim=64,
        page_size=16,
        pool="int8",
        per_token=False,
        query="float16",
    )
    scales = case.scales | {"v_scale": case.scales["v_scale"] * 1e-3}
    got = paged_decode_attention(*case[:4], scale=0.125, **scales, **call())
    want = oracle.decode(*case[:4], scale=0.125, **scales)
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE["float16"]


@needs_hopper_interpreter
@pytest.mark.parametrize(
    ("pool", "splits", "tuning", "chip"),
    [
        ("bfloat16", 1, HopperDecodeTuning(block_tokens=64, stages=2), 132),
        # the interpreter knows no atomic operation, so one thread block has all pieces of a row
        ("bfloat16", 3, HopperDecodeTuning(block_tokens=128, stages=2, waves=1), 1),
        ("float8_e4m3fn", 2, HopperDecodeTuning(block_tokens=64, stages=3, waves=1), 1),
    ],
    ids=str,
)
def test_the_ring_has_no_race(pool, splits, tuning, chip, capfd):
    """More steps than stages: buffers are filled again while others are attended."""
    shape = {
        "splits": splits,
        "per_token": False,
        "window": 560,
        "sinks": True,
        "rows": 2,
        "columns": 38,
    }
    program = Program(4, 1, 64, 16, pool, **shape)
    ragged = Slots([600, 1], {1: 0}, stale=True, seed=0)
    with chip_of(chip):
        check_decode(program, ragged, **call(tuning, detect_races=True))
    assert "race" not in "".join(capfd.readouterr()).lower()


def test_where_rows_are_cut():
    """By bytes and KV heads: eight rows of 1k, or one of 16k, have a piece a multiprocessor."""
    assert cut_of(64, 128, "bfloat16", 8) == Cut(64, steps=8, most=16)
    assert cut_of(64, 128, "int8", 8) == Cut(64, steps=16, most=16)
    assert cut_of(128, 64, "bfloat16", 8) == Cut(128, steps=8, most=16)
    assert cut_of(64, 128, "bfloat16", 1) == Cut(64, steps=4, most=128)
    assert cut_of(64, 128, "bfloat16", 32) == Cut(64, steps=32, most=4)
    assert cut_of(64, 128, "bfloat16", 8, splits=7) == Cut(64, steps=1, most=7)
    assert cut_of(64, 128, "bfloat16", 8).most_pieces(16384) == 16
    assert cut_of(64, 128, "bfloat16", 8).most_pieces(448) == 1


def test_two_thread_blocks_live_on_a_multiprocessor_where_they_fit():
    for head_dim, group, pool, per_chip in (
        (128, 4, "bfloat16", 264),
        (64, 8, "bfloat16", 264),
        (64, 9, "bfloat16", 264),
        (128, 8, "int8", 264),
        (256, 2, "bfloat16", 132),
        (128, 64, "bfloat16", 132),
    ):
        tuning = mosaic_gpu_decode.default_tuning(head_dim, group, pool)
        assert thread_blocks(head_dim, group, pool, tuning) == per_chip


def test_the_ring_fits_the_shared_memory():
    assert default_tuning(128, 4, "bfloat16") == HopperDecodeTuning(block_tokens=64, stages=3)
    assert default_tuning(64, 8, "bfloat16") == HopperDecodeTuning(block_tokens=128, stages=3)
    assert default_tuning(64, 9, "bfloat16").block_tokens == 64, "or the registers fit once"
    assert default_tuning(64, 17, "bfloat16").block_tokens == 128
    assert default_tuning(128, 8, "int8") == HopperDecodeTuning(block_tokens=64, stages=4)
    assert default_tuning(256, 32, "bfloat16").stages == 2


def decode(q, kv_pages, page_table, kv_lens, *scales, **options):
    named = dict(zip(("k_scale", "v_scale"), scales))
    options = {"scale": 0.1, "window": 100, "backend": "mosaic_gpu", **named, **options}
    return paged_decode_attention(q, kv_pages, page_table, kv_lens, **options)


@needs_hopper_interpreter
def test_walks_of_many_pieces():
    """One thread block walks all rows: short ones and one in pieces, more than buffers."""
    program = Program(4, 1, 64, 16, "bfloat16", columns=40, rows=6, window=600)
    ragged = Slots([640, 1, 0, 130, 64, 300], {}, stale=True, seed=1)
    with chip_of(1):
        check_decode(program, ragged, **call(HopperDecodeTuning(64, stages=3, waves=1)))


def decode_operands(heads, kv_heads, head_dim, page_size, pool):
    shape = jax.ShapeDtypeStruct
    quantized = pool in EIGHT_BITS
    scales = [shape((), jnp.float32)] * 2 if quantized else []
    return (
        shape((16, heads, head_dim), jnp.bfloat16 if quantized else pool),
        shape((4096, page_size, 2, kv_heads, head_dim), pool),
        shape((16, 64), jnp.int32),
        shape((16,), jnp.int32),
        *scales,
    )


@pytest.mark.parametrize(
    "shape",
    [
        (12, 4, 80, 64, "bfloat16"),
        pytest.param((32, 8, 128, 16, "int8"), marks=pytest.mark.slow),
        pytest.param((8, 8, 64, 16, "bfloat16"), marks=pytest.mark.slow),
        pytest.param((64, 1, 256, 128, "float16"), marks=pytest.mark.slow),
        pytest.param((32, 8, 96, 32, "float8_e4m3fn"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lowers_for_cuda_without_a_gpu(shape):
    assert "mosaic_gpu" in lowered_for_cuda(decode, *decode_operands(*shape)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_covered_shape_lowers(head_dim, page_size, pool):
    run = functools.partial(decode, soft_cap=30.0, splits=1 + page_size % 3)
    operands = decode_operands(16, 2, head_dim, page_size, pool)
    assert "mosaic_gpu" in lowered_for_cuda(run, *operands).as_text()


def test_lowers_under_shard_map():
    """Manual mesh axes that are not checked: JAX cannot map warps where they are."""
    mesh = AbstractMesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads, pages = P(None, "model"), P(None, None, None, "model")

    def sharded(*operands):
        return jax.shard_map(
            decode, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads, check_vma=False
        )(*operands)

    operands = decode_operands(8, 2, 64, 16, "bfloat16")
    assert jax.eval_shape(sharded, *operands).shape == operands[0].shape


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ((4, 2, 72, 16, "bfloat16"), "head_dim"),
        ((4, 2, 64, 16, "float32"), "kv_pages.dtype"),
        ((4, 2, 64, 16, "uint8"), "kv_pages.dtype"),
        ((4, 2, 64, 8, "bfloat16"), "page_size"),
        ((65, 1, 64, 16, "bfloat16"), "heads / kv_heads"),
    ],
    ids=str,
)
def test_uncovered_shapes_are_refused_by_name(shape, field):
    operands = decode_operands(*shape)
    with pytest.raises(KernelError, match=f"{field}=.*mosaic_gpu backend takes") as caught:
        jax.eval_shape(decode, *operands)
    assert caught.value.field == field
    assert str(operands[1].shape) in str(caught.value)


def test_query_and_pages_have_one_type():
    q, *others = decode_operands(4, 2, 64, 16, "bfloat16")
    with pytest.raises(KernelError, match=r"q\.dtype=float16"):
        jax.eval_shape(decode, jax.ShapeDtypeStruct(q.shape, jnp.float16), *others)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tuning": HopperDecodeTuning(block_tokens=96)}, "tuning.block_tokens"),
        ({"tuning": HopperDecodeTuning(stages=8)}, "tuning.stages"),
        ({"tuning": TritonDecodeTuning()}, "tuning"),
        ({"splits": 65}, "splits"),
    ],
    ids=str,
)
def test_impossible_choices_are_refused_by_name(options, field):
    with pytest.raises(KernelError) as caught:
        jax.eval_shape(
            lambda *operands: decode(*operands, **options),
            *decode_operands(8, 2, 128, 16, "bfloat16"),
        )
    assert caught.value.field == field


def test_covered_shapes_are_not_refused():
    bfloat16 = jnp.dtype("bfloat16")
    shape = AttentionShape(128, 16, 8, pool_dtype=bfloat16, query_dtype=bfloat16)
    assert refusal_of(shape) is None

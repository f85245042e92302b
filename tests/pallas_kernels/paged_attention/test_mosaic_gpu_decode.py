"""The Mosaic GPU decode kernel: in JAX's interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import KernelError, paged_decode_attention
from pallas_kernels.compat import mosaic_gpu_interpreter
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.coverage import mosaic_gpu_decode as refusal_of
from pallas_kernels.paged_attention import mosaic_gpu_decode
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import paged_case

INTERPRETER = mosaic_gpu_interpreter()
needs_interpreter = pytest.mark.skipif(
    INTERPRETER is None,
    reason=f"jax {jax.__version__} cannot interpret Mosaic GPU kernels (0.11 can): "
    "the decode kernel's RESULTS are not tested here, only that it lowers",
)

# heads, kv_heads, head_dim, page size, type, window
CASES = [
    (2, 2, 64, 16, "bfloat16", None),
    (4, 1, 128, 32, "float16", None),
    (8, 1, 64, 64, "bfloat16", 50),
    (3, 1, 128, 16, "bfloat16", 17),
    (20, 1, 64, 32, "float16", 1),
]


def interpreted(case, window, scale, **parameters):
    def call(*operands):
        return paged_decode_attention(
            *operands,
            scale=scale,
            window=window,
            first_page=case.first_page,
            backend="mosaic_gpu",
            interpret=INTERPRETER(**parameters),
        )

    return jax.jit(call)(case.q, case.kv_pages, case.page_table, case.lengths)


@needs_interpreter
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_random_page_tables(shape):
    """Boundary lengths, shared pages, page ids in random order, NaN wherever nobody may look."""
    heads, kv_heads, head_dim, page_size, dtype, window = shape
    rng = np.random.default_rng(0)
    longest = 5 * page_size
    case = paged_case(
        rng,
        [longest - 1, longest, 0, 1, page_size - 1, page_size, page_size + 1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=dtype,
        first_page=3,
    )
    scale = head_dim**-0.5
    got = interpreted(case, window, scale)
    want = oracle.decode(*case[:4], scale=scale, window=window, first_page=3)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[dtype]
    assert not np.asarray(got, np.float32)[2].any()


@needs_interpreter
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_splits_are_merged(splits, monkeypatch, capfd):
    """More splits than some slots have blocks, more steps than buffers; and no data race."""
    monkeypatch.setattr(mosaic_gpu_decode, "number_of_splits", lambda *shape: splits)
    rng = np.random.default_rng(splits)
    lengths = [389, 70, 1, 0]
    case = paged_case(rng, lengths, heads=4, kv_heads=1, head_dim=64, page_size=16, pool="bfloat16")
    got = interpreted(case, None, 0.125, detect_races=True)
    want = oracle.decode(*case[:4], scale=0.125)
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE["bfloat16"]
    assert "race" not in "".join(capfd.readouterr()).lower()


def test_the_number_of_splits_fills_the_gpu_and_no_more():
    assert mosaic_gpu_decode.number_of_splits(slots=256, kv_heads=8, max_blocks=64) == 1
    assert mosaic_gpu_decode.number_of_splits(slots=1, kv_heads=8, max_blocks=256) == 33
    assert mosaic_gpu_decode.number_of_splits(slots=1, kv_heads=8, max_blocks=4) == 4
    assert mosaic_gpu_decode.number_of_splits(slots=1, kv_heads=1, max_blocks=1000) == 64


def lowered_for_cuda(function, operands) -> str:
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def decode(q, kv_pages, page_table, kv_lens):
    return paged_decode_attention(
        q, kv_pages, page_table, kv_lens, scale=0.1, window=100, backend="mosaic_gpu"
    )


def decode_operands(heads, kv_heads, head_dim, page_size, dtype):
    shape = jax.ShapeDtypeStruct
    return (
        shape((16, heads, head_dim), dtype),
        shape((4096, page_size, 2, kv_heads, head_dim), dtype),
        shape((16, 64), jnp.int32),
        shape((16,), jnp.int32),
    )


@pytest.mark.parametrize(
    "shape",
    [(8, 8, 64, 16, jnp.bfloat16), (32, 8, 128, 32, jnp.float16), (64, 1, 128, 64, jnp.bfloat16)],
    ids=str,
)
def test_lowers_for_cuda_without_a_gpu(shape):
    assert "mosaic_gpu" in lowered_for_cuda(decode, decode_operands(*shape))


def test_lowers_under_shard_map():
    """Manual mesh axes are checked: the kernel says over which axes its results vary."""
    mesh = AbstractMesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads, pages = P(None, "model"), P(None, None, None, "model")

    def sharded(*operands):
        return jax.shard_map(decode, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads)(
            *operands
        )

    operands = decode_operands(8, 2, 64, 16, jnp.bfloat16)
    assert jax.eval_shape(sharded, *operands).shape == operands[0].shape


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ((4, 2, 80, 16, jnp.bfloat16), "head_dim"),
        ((4, 2, 64, 16, jnp.float32), "kv_pages.dtype"),
        ((4, 2, 64, 8, jnp.bfloat16), "page_size"),
        ((65, 1, 64, 16, jnp.bfloat16), "heads / kv_heads"),
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
    q, *others = decode_operands(4, 2, 64, 16, jnp.bfloat16)
    with pytest.raises(KernelError, match=r"q\.dtype=float32"):
        jax.eval_shape(decode, jax.ShapeDtypeStruct(q.shape, jnp.float32), *others)


def test_covered_shapes_are_not_refused():
    bfloat16 = jnp.dtype("bfloat16")
    shape = AttentionShape(128, 16, 8, pool_dtype=bfloat16, query_dtype=bfloat16)
    assert refusal_of(shape) is None

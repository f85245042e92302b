"""The Mosaic GPU decode kernel: in JAX's interpreter against float64, and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import DecodeTuning, KernelError, paged_decode_attention
from pallas_kernels.compat import mosaic_gpu_interpreter
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.coverage import mosaic_gpu_decode as refusal_of
from pallas_kernels.paged_attention.mosaic_gpu_decode import default_tuning, number_of_splits
from pallas_kernels.paged_attention.mosaic_gpu_decode_plan import split_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.cases import EIGHT_BITS, paged_case

INTERPRETER = mosaic_gpu_interpreter()
needs_interpreter = pytest.mark.skipif(
    INTERPRETER is None,
    reason=f"jax {jax.__version__} cannot interpret Mosaic GPU kernels (0.11 can): "
    "the decode kernel's RESULTS are not tested here, only that it lowers",
)


def attended(case, heads, head_dim, splits=None, tuning=None, seed=0, interpreter=(), **options):
    """The kernel's result in the interpreter, and the oracle's."""
    sinks = options.pop("sinks", False)
    options |= {"scale": head_dim**-0.5, **case.options}
    if sinks:
        values = np.random.default_rng(seed).standard_normal(heads)
        options["sinks"] = jnp.asarray(values, jnp.float32)
    first_page = options.pop("first_page")

    def call(*operands):
        return paged_decode_attention(
            *operands,
            **options,
            first_page=first_page,
            splits=splits,
            backend="mosaic_gpu",
            tuning=tuning,
            interpret=INTERPRETER(**dict(interpreter)),
        )

    got = jax.jit(call)(case.q, case.kv_pages, case.page_table, case.lengths)
    return got, oracle.decode(*case[:4], **options, first_page=first_page)


def without_unseen(case, lengths, page_size, window, pool):
    """The case with every page that no slot's window reaches made NaN, its scales too."""
    table = np.asarray(case.page_table)
    seen = np.zeros(case.kv_pages.shape[0], bool)
    for row, length in enumerate(lengths):
        for token in range(max(0, length - window), length):
            seen[case.first_page + table[row, token // page_size]] = True
    pages = np.array(case.kv_pages)
    if pool != "int8":
        pages[~seen] = np.nan
    scales = {
        name: jnp.where(seen[:, None], scale, jnp.nan) if scale.ndim else scale
        for name, scale in case.scales.items()
    }
    return case._replace(kv_pages=jnp.asarray(pages), scales=scales)


def check(lengths, heads, kv_heads, head_dim, page_size, pool, seed=0, **options):
    """One random problem, every length of it, against the oracle."""
    held = {name: options.pop(name) for name in ("per_page", "query") if name in options}
    case = paged_case(
        np.random.default_rng(seed),
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pool=pool,
        first_page=3,
        **held,
    )
    if options.get("window"):
        case = without_unseen(case, lengths, page_size, options["window"], pool)
    got, want = attended(case, heads, head_dim, seed=seed, **options)
    assert got.dtype == case.q.dtype
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE[pool]
    assert not np.asarray(got, np.float32)[np.asarray(lengths) == 0].any()


ALL = {"soft_cap": 2.0, "sinks": True}

# lengths, heads, KV heads, head_dim, page size, type of the pages, options; row 1 shares pages
CASES = [
    ([133, 132, 0, 1, 15, 16, 17, 64, 65], 4, 1, 128, 16, "bfloat16", {}),
    ([261, 260, 0, 127, 129], 20, 1, 64, 128, "float16", {"splits": 2, "window": 70} | ALL),
    ([200, 33], 6, 2, 80, 32, "bfloat16", {"splits": 7, "window": 130} | ALL),
    ([130, 65, 0], 5, 1, 96, 64, "float16", {"splits": 2}),
    ([130, 64], 33, 1, 256, 64, "bfloat16", {"sinks": True}),
    ([133, 17, 15, 1], 4, 1, 128, 16, "int8", {"splits": 2, "window": 33}),
    ([140, 128], 4, 1, 80, 128, "float8_e4m3fn", {"per_page": False, "query": "float16"} | ALL),
    ([300, 31, 0], 16, 1, 64, 32, "float8_e4m3fn", {"window": 290}),
]


@needs_interpreter
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_random_page_tables(shape):
    """Boundary lengths, shared pages, page ids in random order, NaN wherever nobody may look."""
    *facts, options = shape
    check(*facts, **options)


@needs_interpreter
def test_small_scales_of_values_do_not_underflow():
    """Weights times 1e-5 would be subnormal float16 numbers; the result is a normal one."""
    facts = {"heads": 2, "kv_heads": 1, "head_dim": 64, "page_size": 16, "pool": "int8"}
    case = paged_case(np.random.default_rng(0), [100], query="float16", **facts)
    scales = case.scales | {"v_scale": case.scales["v_scale"] * 1e-3}
    got, want = attended(case._replace(scales=scales), 2, 64)
    assert oracle.relative_error(got, want) <= oracle.TOLERANCE["float16"]


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("pool", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_and_type(head_dim, pool):
    seed = head_dim + len(pool)
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 3))
    page_size = int(rng.choice([16, 32, 64, 128]))
    lengths = [int(length) for length in rng.integers(0, 400, 4)] + [0, page_size + 1]
    check(
        lengths,
        int(rng.integers(1, 9)) * kv_heads,
        kv_heads,
        head_dim,
        page_size,
        pool,
        seed=seed,
        splits=int(rng.choice([1, 2, 7])),
        window=[None, int(rng.integers(1, 300))][rng.integers(2)],
        soft_cap=[None, 3.0][rng.integers(2)],
        sinks=bool(rng.integers(2)),
        **({"per_page": bool(rng.integers(2))} if pool in EIGHT_BITS else {}),
    )


@needs_interpreter
@pytest.mark.parametrize(
    ("pool", "splits", "tuning"),
    [
        ("bfloat16", 1, DecodeTuning(block_tokens=64, stages=2)),
        ("bfloat16", 3, DecodeTuning(block_tokens=128, stages=2)),
        ("float8_e4m3fn", 2, DecodeTuning(block_tokens=64, stages=3)),
    ],
    ids=str,
)
def test_the_ring_has_no_race(pool, splits, tuning, capfd):
    """More steps than stages: buffers are filled again while others are attended."""
    options = {"splits": splits, "tuning": tuning, "window": 560, "sinks": True}
    check([600, 1], 4, 1, 64, 16, pool, interpreter={"detect_races": True}, **options)
    assert "race" not in "".join(capfd.readouterr()).lower()


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_every_visible_step_belongs_to_one_split(splits, window):
    for length in (0, 1, 63, 64, 65, 300, 1000):
        spans = [
            split_of(jnp.int32(length), jnp.int32(i), block_tokens=64, splits=splits, window=window)
            for i in range(splits)
        ]
        steps = [int(s.begin) + j for s in spans for j in range(int(s.steps))]
        first = 0 if window is None else max(0, length - window)
        assert steps == list(range(first // 64, -(-length // 64)))
        # the merge relies on it
        used = [bool(s.steps > 0) for s in spans]
        assert used == sorted(used, reverse=True)


def test_the_number_of_splits_fills_the_gpu_and_no_more():
    wanted = DecodeTuning(multiprocessors=132, waves=2)
    assert number_of_splits(256, 8, max_blocks=64, tuning=wanted) == 1
    assert number_of_splits(32, 8, max_blocks=64, tuning=wanted) == 1
    assert number_of_splits(16, 8, max_blocks=64, tuning=wanted) == 2
    assert number_of_splits(1, 8, max_blocks=256, tuning=wanted) == 33
    assert number_of_splits(1, 8, max_blocks=4, tuning=wanted) == 4
    assert number_of_splits(1, 1, max_blocks=1000, tuning=wanted) == 64


def test_the_ring_fits_the_shared_memory():
    assert default_tuning(128, 4, "bfloat16") == DecodeTuning(block_tokens=64, stages=3)
    assert default_tuning(64, 8, "bfloat16") == DecodeTuning(block_tokens=128, stages=3)
    assert default_tuning(128, 8, "int8") == DecodeTuning(block_tokens=64, stages=4)
    assert default_tuning(256, 32, "bfloat16").stages == 2


def lowered_for_cuda(function, operands) -> str:
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def decode(q, kv_pages, page_table, kv_lens, *scales, **options):
    named = dict(zip(("k_scale", "v_scale"), scales))
    options = {"scale": 0.1, "window": 100, "backend": "mosaic_gpu", **named, **options}
    return paged_decode_attention(q, kv_pages, page_table, kv_lens, **options)


def decode_operands(heads, kv_heads, head_dim, page_size, pool):
    shape = jax.ShapeDtypeStruct
    quantized = pool in EIGHT_BITS
    scales = [shape((4096, kv_heads), jnp.float32)] * 2 if quantized else []
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
        (8, 8, 64, 16, "bfloat16"),
        (12, 4, 80, 64, "bfloat16"),
        (64, 1, 256, 128, "float16"),
        (32, 8, 128, 16, "int8"),
        (32, 8, 96, 32, "float8_e4m3fn"),
    ],
    ids=str,
)
def test_lowers_for_cuda_without_a_gpu(shape):
    assert "mosaic_gpu" in lowered_for_cuda(decode, decode_operands(*shape))


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_covered_shape_lowers(head_dim, page_size, pool):
    def call(*operands):
        return decode(*operands, soft_cap=30.0, splits=1 + page_size % 3)

    assert "mosaic_gpu" in lowered_for_cuda(call, decode_operands(16, 2, head_dim, page_size, pool))


def test_lowers_under_shard_map():
    """Manual mesh axes are checked: the kernel says over which axes its results vary."""
    mesh = AbstractMesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads, pages = P(None, "model"), P(None, None, None, "model")

    def sharded(*operands):
        return jax.shard_map(decode, mesh=mesh, in_specs=(heads, pages, P(), P()), out_specs=heads)(
            *operands
        )

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
        ({"tuning": DecodeTuning(block_tokens=96)}, "tuning.block_tokens"),
        ({"tuning": DecodeTuning(stages=8)}, "tuning.stages"),
        ({"tuning": DecodeTuning(consumers=2)}, "tuning.consumers"),
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

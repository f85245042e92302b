"""The Mosaic GPU kernel: in JAX's interpreter against float64, lowered and compiled for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import gpu_targets
from pallas_kernels.compat import mosaic_gpu_interpreter
from pallas_kernels.prove import Requirements, prove
from pallas_kernels.quantized_matmul import Int8Weight, nibbles, quantized_matmul
from pallas_kernels.quantized_matmul.splits import number_of_splits
from pallas_kernels.tuning import MatmulTuning
from tests.pallas_kernels.quantized_matmul import oracle
from tests.pallas_kernels.quantized_matmul.lowering import abstract_weight, lowered_for_cuda

INTERPRETER = mosaic_gpu_interpreter()
needs_interpreter = pytest.mark.skipif(
    INTERPRETER is None,
    reason=f"jax {jax.__version__} cannot interpret Mosaic GPU kernels (0.11 can): the RESULTS of "
    "quantized_matmul's kernel are not tested here, only that it lowers",
)
try:
    gpu_targets.require_compiler()
    MISSING = ""
except gpu_targets.CompilerMissingError as error:
    MISSING = str(error)
needs_compiler = pytest.mark.skipif(
    bool(MISSING), reason=f"no kernel is COMPILED for a GPU here: {MISSING}"
)

# rows, outputs, inputs, kind, type of x, tile_m, stages, splits
CASES = [
    (1, 128, 512, "int8", "bfloat16", 64, 2, 1),
    (7, 208, 512, "int4 128 zeros", "bfloat16", 64, 2, 1),
    (16, 128, 768, "int4 64", "bfloat16", 64, 2, 2),
    (2, 128, 256, "int4 32", "float16", 64, 2, 1),
    (9, 128, 512, "int4 row zeros", "bfloat16", 8, 2, 2),
    (16, 208, 384, "fp8 tensor", "bfloat16", 64, 2, 1),
    # rows that end inside a block of 256 inputs
    (8, 128, 896, "int4 128 zeros", "bfloat16", 64, 2, 2),
]
SLOW_CASES = [
    (64, 336, 1024, "int4 128", "bfloat16", 64, 3, 2),
    (200, 144, 640, "int8", "float16", 128, 2, 1),
    (200, 208, 512, "int4 64 zeros", "bfloat16", 64, 2, 1),
    (7, 128, 512, "fp8", "float16", 64, 4, 4),
    (16, 128, 512, "int4 32 zeros", "bfloat16", 64, 2, 1),
    (1, 128, 1024, "int4 row", "float16", 64, 2, 4),
    (5, 128, 288, "int4 32 zeros", "bfloat16", 64, 2, 1),
    (3, 128, 448, "int4 64", "float16", 64, 2, 1),
    (9, 128, 416, "int4 row zeros", "bfloat16", 8, 2, 2),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in SLOW_CASES]


def interpreted(x, weight, tuning, **options):
    return quantized_matmul(
        x,
        weight,
        tuning=tuning,
        backend="mosaic_gpu",
        interpret=INTERPRETER(),
        out_dtype="float32",
        **options,
    )


@needs_interpreter
@pytest.mark.parametrize("case", [*CASES, *SLOW], ids=str)
def test_against_float64(case):
    """Tails of rows and channels, more steps than stages, parts of K, all formats and groups."""
    rows, outputs, inputs, kind, dtype, tile_m, stages, splits = case
    rng = np.random.default_rng(rows + inputs)
    weight = oracle.random_weight(rng, outputs, inputs, kind)
    x = oracle.random_rows(rng, rows, inputs, dtype)
    tuning = MatmulTuning(tile_m=tile_m, stages=stages, splits=splits)
    # weights are exact in the type of x and products are added in float32
    assert oracle.rows_fit(x, interpreted(x, weight, tuning), weight, 1e-5)


@needs_interpreter
@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_int8_activations_are_exact(splits):
    rng = np.random.default_rng(0)
    weight = oracle.random_weight(rng, 128, 768, "int8")
    x = oracle.random_rows(rng, 10, 768, "bfloat16")
    plain = Int8Weight(weight.values, jnp.ones_like(weight.scale))
    tuning = MatmulTuning(stages=2, splits=splits)
    got = interpreted(x, plain, tuning, activations="int8")
    sums, row_scale = oracle.integer_product(x, weight)
    np.testing.assert_array_equal(got, sums.astype(np.float32) * row_scale[:, None])


@needs_interpreter
def test_fp8_activations():
    rng = np.random.default_rng(1)
    weight = oracle.random_weight(rng, 128, 256, "fp8")
    x = oracle.random_rows(rng, 3, 256, "bfloat16")
    got = interpreted(x, weight, MatmulTuning(stages=2, splits=1), activations="fp8")
    want = quantized_matmul(x, weight, activations="fp8", backend="reference", out_dtype="float32")
    assert oracle.relative_error(got, np.asarray(want, np.float64)) <= 1e-5


@needs_interpreter
def test_no_data_race(capfd):
    rng = np.random.default_rng(2)
    weight = oracle.random_weight(rng, 128, 1024, "int4 128 zeros")
    x = oracle.random_rows(rng, 8, 1024, "bfloat16")
    got = quantized_matmul(
        x,
        weight,
        tuning=MatmulTuning(stages=2, splits=1),
        backend="mosaic_gpu",
        interpret=INTERPRETER(detect_races=True),
        out_dtype="float32",
    )
    assert oracle.rows_fit(x, got, weight, 1e-5)
    assert "race" not in "".join(capfd.readouterr()).lower()


def test_bits_of_small_floats_are_integers():
    """The fact by which the kernel converts nibbles; the interpreter computes them otherwise."""
    count = np.arange(256, dtype=np.uint16)
    as_bfloat16 = count.view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(as_bfloat16, count * 2.0 ** nibbles.SPACING[nibbles.BFLOAT16])
    as_float16 = count.view(np.float16).astype(np.float64)
    np.testing.assert_array_equal(as_float16, count * 2.0 ** nibbles.SPACING[nibbles.FLOAT16])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("nibble", [0, 1, 2, 3])
def test_emulated_nibbles(nibble, dtype):
    words = np.random.default_rng(3).integers(0, 2**16, (64, 64)).astype(np.uint16)
    zero = np.arange(64).astype(np.float32) % 17
    got = nibbles.centred_nibbles(jnp.asarray(words), nibble, jnp.asarray(zero), dtype, True)
    want = ((words >> (4 * nibble)) & 15).astype(np.float64) - zero[:, None]
    unit = nibbles.NIBBLE_UNIT[jnp.dtype(dtype)]
    np.testing.assert_array_equal(np.asarray(got, np.float64) * unit, want)


def test_splits_fill_the_gpu_and_no_more():
    assert number_of_splits(tiles=32, steps=16, multiprocessors=132) == 4
    assert number_of_splits(tiles=86, steps=32, multiprocessors=132) == 3
    assert number_of_splits(tiles=1000, steps=32, multiprocessors=132) == 1
    assert number_of_splits(tiles=1, steps=4, multiprocessors=132) == 1
    for steps in range(1, 60):
        splits = number_of_splits(tiles=7, steps=steps, multiprocessors=132)
        assert (splits - 1) * -(-steps // splits) < steps, "an empty part"


@pytest.mark.parametrize(
    ("rows", "kind", "dtype", "activations"),
    [
        (16, "int4 128 zeros", "bfloat16", "float"),
        (300, "int8", "bfloat16", "int8"),
        pytest.param(2048, "int4 64", "bfloat16", "float", marks=pytest.mark.slow),
        pytest.param(8, "int8", "float16", "float", marks=pytest.mark.slow),
        pytest.param(16, "fp8", "bfloat16", "fp8", marks=pytest.mark.slow),
        pytest.param(2048, "fp8 tensor", "bfloat16", "float", marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda_without_a_gpu(rows, kind, dtype, activations):
    text = lowered_for_cuda("mosaic_gpu", rows, 512, 1024, kind, dtype, activations)
    assert "mosaic_gpu" in text


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "kind", "activations"),
    [
        (16, "int4 128 zeros", "float"),
        pytest.param(16, "int8", "float", marks=pytest.mark.slow),
        pytest.param(16, "fp8", "fp8", marks=pytest.mark.slow),
        pytest.param(16, "int4 32 zeros", "float", marks=pytest.mark.slow),
        pytest.param(128, "int4 128 zeros", "float", marks=pytest.mark.slow),
        pytest.param(2048, "int4 32 zeros", "float", marks=pytest.mark.slow),
        pytest.param(2048, "int8", "int8", marks=pytest.mark.slow),
        pytest.param(2048, "fp8", "float", marks=pytest.mark.slow),
    ],
)
def test_compiles_for_h200_without_spills(rows, kind, activations):
    proof = prove(
        kind,
        functools.partial(quantized_matmul, activations=activations, backend="mosaic_gpu"),
        jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16),
        abstract_weight(4096, 4096, kind),
        mesh=gpu_targets.gpu_mesh("h200"),
        kind="h200",
        wanted=Requirements(
            instructions={"quantized_matmul": "wgmma"}, own_kernel=True, max_temporaries=2**24
        ),
    )
    assert proof.failures == ()

"""The Mosaic GPU kernel: in JAX's interpreter against float64, lowered and compiled for CUDA."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from benchmarks.verify.prove import Requirements, gpu_targets, prove
from pallas_kernels import KernelError
from pallas_kernels.backends.mosaic_gpu import HopperMatmulTuning
from pallas_kernels.quantized_matmul import mosaic_gpu, nibbles, quantized_matmul
from tests.absent_devices import HOPPER_INTERPRETER, needs_gpu_compiler, needs_hopper_interpreter
from tests.pallas_kernels.lowering import lowered_for_cuda
from tests.pallas_kernels.quantized_matmul.checks import VALUES, Product, Values, check
from tests.pallas_kernels.quantized_matmul.lowering import abstract_weight, lowered_text
from tests.pallas_kernels.strategies import examples

# tails of rows and channels, more steps than stages, parts of K, all formats and groups
CASES = [
    (Product(1, 128, 512, "int8", "bfloat16"), 64, 2, 1),
    (Product(7, 208, 512, "int4 128 zeros float16", "bfloat16"), 64, 2, 1),
    (Product(16, 128, 768, "int4 64 bfloat16", "bfloat16"), 64, 2, 2),
    (Product(2, 128, 256, "int4 32", "float16"), 64, 2, 1),
    (Product(9, 128, 512, "int4 row zeros float16", "bfloat16"), 8, 2, 2),
    (Product(16, 208, 384, "fp8 tensor", "bfloat16"), 64, 2, 1),
    # rows that end inside a block of 256 inputs
    (Product(8, 128, 896, "int4 128 zeros", "bfloat16"), 64, 2, 2),
    (Product(10, 128, 768, "int8", "bfloat16", "int8"), 64, 2, 1),
    (Product(3, 128, 256, "fp8", "bfloat16", "fp8"), 64, 2, 1),
]
SLOW_CASES = [
    (Product(64, 336, 1024, "int4 128", "bfloat16"), 64, 3, 2),
    (Product(200, 144, 640, "int8", "float16"), 128, 2, 1),
    (Product(200, 208, 512, "int4 64 zeros", "bfloat16"), 64, 2, 1),
    (Product(7, 128, 512, "fp8", "float16"), 64, 4, 4),
    (Product(16, 128, 512, "int4 32 zeros", "bfloat16"), 64, 2, 1),
    (Product(1, 128, 1024, "int4 row", "float16"), 64, 2, 4),
    (Product(10, 128, 768, "int8", "bfloat16", "int8"), 64, 2, 3),
    (Product(5, 128, 288, "int4 32 zeros", "bfloat16"), 64, 2, 1),
    (Product(3, 128, 448, "int4 64", "float16"), 64, 2, 1),
    (Product(9, 128, 416, "int4 row zeros", "bfloat16"), 8, 2, 2),
    (Product(9, 144, 512, "fp8 128", "bfloat16", "fp8"), 8, 2, 2),
    (Product(20, 128, 384, "fp8 128", "bfloat16"), 64, 2, 1),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


@needs_hopper_interpreter
@pytest.mark.parametrize(("product", "tile_m", "stages", "splits"), [*CASES, *SLOW], ids=str)
@examples(2)
@given(values=VALUES)
def test_against_float64(product, tile_m, stages, splits, values):
    tuning = HopperMatmulTuning(tile_m=tile_m, stages=stages, splits=splits)
    check(product, values, tuning=tuning, backend="mosaic_gpu", interpret=HOPPER_INTERPRETER())


@needs_hopper_interpreter
def test_no_data_race(capfd):
    check(
        Product(8, 128, 1024, "int4 128 zeros", "bfloat16"),
        Values(any_bits=True, zero_row=False, seed=2),
        tuning=HopperMatmulTuning(stages=2, splits=1),
        backend="mosaic_gpu",
        interpret=HOPPER_INTERPRETER(detect_races=True),
    )
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
    text = lowered_text("mosaic_gpu", rows, 512, 1024, kind, dtype, activations)
    assert "mosaic_gpu" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "kind", "tuning", "most"),
    [
        (300, "int8", HopperMatmulTuning(splits=2), 5),
        (300, "int4 128", HopperMatmulTuning(splits=1), 4),
        (300, "int4 128", HopperMatmulTuning(splits=2), 3),
        (16, "int4 32 zeros", HopperMatmulTuning(splits=1), 7),
        (256, "fp8", HopperMatmulTuning(tile_m=256, splits=1), 1),
    ],
)
def test_the_most_stages_are_those_that_jax_takes(rows, kind, tuning, most, monkeypatch):
    def lower(stages):
        options = {"backend": "mosaic_gpu", "tuning": replace(tuning, stages=stages)}
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
        weight = abstract_weight(512, 1024, kind)
        lowered_for_cuda(functools.partial(quantized_matmul, **options), x, weight)

    lower(most)
    with pytest.raises(KernelError, match=f"stages={most + 1} .* at most {most} "):
        lower(most + 1)
    monkeypatch.setattr(mosaic_gpu, "require_fit", lambda *_: None)
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        lower(most + 1)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("rows", "kind", "activations"),
    [
        (16, "int4 128 zeros", "float"),
        pytest.param(16, "int8", "float", marks=pytest.mark.slow),
        pytest.param(16, "fp8", "fp8", marks=pytest.mark.slow),
        pytest.param(1, "fp8 128", "fp8", marks=pytest.mark.slow),
        pytest.param(2048, "fp8 128", "fp8", marks=pytest.mark.slow),
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

"""The Triton kernel: interpreted against float64, and lowered for CUDA."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.tuning import MatmulTuning
from tests.pallas_kernels.quantized_matmul import oracle
from tests.pallas_kernels.quantized_matmul.lowering import lowered_for_cuda

# rows, outputs, inputs, kind, type of x, splits
CASES = [
    (7, 72, 320, "int4 64 zeros", "bfloat16", 2),
]
SLOW_CASES = [
    (20, 40, 160, "fp8 tensor", "float32", 1),
    (1, 200, 352, "int8", "bfloat16", 1),
    (2, 72, 384, "int4 128", "float16", 1),
    (16, 72, 544, "int4 32 zeros", "bfloat16", 3),
    (64, 136, 384, "int4 128 zeros", "bfloat16", 1),
    (200, 72, 320, "int4 row", "float32", 1),
    (16, 72, 416, "int4 row zeros", "bfloat16", 2),
    (33, 72, 256, "fp8", "bfloat16", 1),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in SLOW_CASES]


@pytest.mark.parametrize("case", [*CASES, *SLOW], ids=str)
def test_against_float64(case):
    """Tails of every dimension, parts of K, all formats and groups."""
    rows, outputs, inputs, kind, dtype, splits = case
    rng = np.random.default_rng(rows + inputs)
    weight = oracle.random_weight(rng, outputs, inputs, kind)
    x = oracle.random_rows(rng, rows, inputs, dtype)
    got = quantized_matmul(
        x,
        weight,
        tuning=MatmulTuning(tile_m=32, tile_n=64, tile_k=64, splits=splits),
        backend="triton",
        interpret=True,
        out_dtype="float32",
    )
    assert oracle.rows_fit(x, got, weight, 1e-5)


@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_int8_activations_are_exact(splits):
    rng = np.random.default_rng(0)
    weight = oracle.random_weight(rng, 40, 352, "int8")
    x = oracle.random_rows(rng, 5, 352, "bfloat16")
    got = quantized_matmul(
        x,
        weight,
        activations="int8",
        tuning=MatmulTuning(tile_m=16, tile_n=64, tile_k=64, splits=splits),
        backend="triton",
        interpret=True,
        out_dtype="float32",
    )
    sums, row_scale = oracle.integer_product(x, weight)
    want = sums.astype(np.float64) * row_scale[:, None] * np.asarray(weight.scale)
    assert oracle.relative_error(got, want) < 5e-7


@pytest.mark.parametrize(
    ("rows", "kind", "dtype", "activations"),
    [
        (300, "int4 32 zeros", "float16", "float"),
        (16, "int8", "bfloat16", "int8"),
        pytest.param(16, "int4 128", "bfloat16", "float", marks=pytest.mark.slow),
        pytest.param(2048, "fp8", "float32", "float", marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda_without_a_gpu(rows, kind, dtype, activations):
    text = lowered_for_cuda("triton", rows, 512, 1024, kind, dtype, activations)
    assert "triton" in text

"""The Mosaic TPU kernel, interpreted against float64."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.tuning import MatmulTuning
from tests.pallas_kernels.quantized_matmul import oracle

# rows, outputs, inputs, kind, type of x, tile_k
CASES = [
    (7, 256, 1024, "int4 64 zeros", "bfloat16", 512),
]
SLOW_CASES = [
    (3, 128, 384, "int8", "float32", 128),
    (1, 128, 768, "int4 128 zeros", "bfloat16", 512),
    (40, 256, 2048, "int4 128", "bfloat16", 1024),
    (64, 128, 512, "int4 32", "float32", 512),
    (200, 128, 1024, "int4 row zeros", "bfloat16", 512),
    (2, 128, 512, "int4 row", "bfloat16", 512),
    (16, 384, 256, "fp8 tensor", "bfloat16", 128),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in SLOW_CASES]


@pytest.mark.parametrize("case", [*CASES, *SLOW], ids=str)
def test_against_float64(case):
    """Rows beyond whole tiles, several blocks of K, all formats and groups."""
    rows, outputs, inputs, kind, dtype, tile_k = case
    rng = np.random.default_rng(rows + inputs)
    weight = oracle.random_weight(rng, outputs, inputs, kind)
    x = oracle.random_rows(rng, rows, inputs, dtype)
    got = quantized_matmul(
        x,
        weight,
        tuning=MatmulTuning(tile_m=32, tile_n=128, tile_k=tile_k),
        backend="mosaic_tpu",
        interpret=True,
        out_dtype="float32",
    )
    assert oracle.rows_fit(x, got, weight, 1e-5)


def test_int8_activations_are_exact():
    rng = np.random.default_rng(0)
    weight = oracle.random_weight(rng, 128, 256, "int8")
    x = oracle.random_rows(rng, 5, 256, "bfloat16")
    got = quantized_matmul(
        x,
        weight,
        activations="int8",
        tuning=MatmulTuning(tile_m=32, tile_n=128, tile_k=128),
        backend="mosaic_tpu",
        interpret=True,
        out_dtype="float32",
    )
    sums, row_scale = oracle.integer_product(x, weight)
    want = sums.astype(np.float64) * row_scale[:, None] * np.asarray(weight.scale)
    assert oracle.relative_error(got, want) < 5e-7

"""The Triton kernel: interpreted against float64, and lowered for CUDA."""

from __future__ import annotations

import pytest
from hypothesis import given

from pallas_kernels.backends.triton import TritonMatmulTuning
from tests.pallas_kernels.quantized_matmul.checks import VALUES, Product, check
from tests.pallas_kernels.quantized_matmul.lowering import lowered_text
from tests.pallas_kernels.strategies import examples

# tails of every dimension, parts of K, all formats and groups
CASES = [
    (Product(7, 72, 320, "int4 64 zeros float16", "bfloat16"), 2),
    # a row that ends in its only block of words has the groups of its inputs alone
    (Product(7, 72, 128, "int4 32", "bfloat16"), 1),
]
SLOW_CASES = [
    (Product(5, 40, 352, "int8", "bfloat16", "int8"), 1),
    (Product(20, 40, 160, "fp8 tensor", "float32"), 1),
    (Product(1, 200, 352, "int8", "bfloat16"), 1),
    (Product(2, 72, 384, "int4 128", "float16"), 1),
    (Product(2, 72, 128, "int4 64", "bfloat16"), 1),
    (Product(2, 72, 64, "int4 32", "bfloat16"), 1),
    (Product(16, 72, 544, "int4 32 zeros", "bfloat16"), 3),
    (Product(64, 136, 384, "int4 128 zeros", "bfloat16"), 1),
    (Product(200, 72, 320, "int4 row", "float32"), 1),
    (Product(16, 72, 416, "int4 row zeros bfloat16", "bfloat16"), 2),
    (Product(33, 72, 256, "fp8", "bfloat16"), 1),
    (Product(70, 72, 384, "fp8 128", "bfloat16"), 2),
    (Product(5, 40, 352, "int8", "bfloat16", "int8"), 3),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


@pytest.mark.parametrize(("product", "splits"), [*CASES, *SLOW], ids=str)
@pytest.mark.usefixtures("poison_outside")
@examples(3)
@given(values=VALUES)
def test_against_float64(product, splits, values):
    tile_m = 16 if product.activations == "int8" else 32
    tuning = TritonMatmulTuning(tile_m=tile_m, tile_n=64, tile_k=64, splits=splits)
    check(product, values, tuning=tuning, backend="triton", interpret=True)


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
    text = lowered_text("triton", rows, 512, 1024, kind, dtype, activations)
    assert "triton" in text

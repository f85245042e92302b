"""The Mosaic TPU kernel, interpreted against float64."""

from __future__ import annotations

import pytest
from hypothesis import given

from pallas_kernels.backends.mosaic_tpu import TpuMatmulTuning
from tests.pallas_kernels.quantized_matmul.checks import VALUES, Product, check
from tests.pallas_kernels.strategies import examples

# rows beyond whole tiles, several blocks of K (the number behind a product), formats and groups
CASES = [
    (Product(5, 128, 256, "int8", "bfloat16", "int8"), 128),
]
SLOW_CASES = [
    (Product(7, 256, 1024, "int4 64 zeros", "bfloat16"), 512),
    (Product(3, 128, 384, "int8", "float32"), 128),
    (Product(1, 128, 768, "int4 128 zeros", "bfloat16"), 512),
    (Product(40, 256, 2048, "int4 128", "bfloat16"), 1024),
    (Product(64, 128, 512, "int4 32", "float32"), 512),
    (Product(200, 128, 1024, "int4 row zeros", "bfloat16"), 512),
    (Product(2, 128, 512, "int4 row", "bfloat16"), 512),
    (Product(16, 384, 256, "fp8 tensor", "bfloat16"), 128),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


@pytest.mark.parametrize(("product", "tile_k"), [*CASES, *SLOW], ids=str)
@examples(3)
@given(values=VALUES)
def test_against_float64(product, tile_k, values):
    tuning = TpuMatmulTuning(tile_m=32, tile_n=128, tile_k=tile_k)
    check(product, values, tuning=tuning, backend="mosaic_tpu", interpret=True)

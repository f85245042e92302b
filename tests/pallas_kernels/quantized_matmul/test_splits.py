"""Parts of K: what the plans of both GPU kernels choose for the products of real models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.quantized_matmul import mosaic_gpu_plan, triton
from pallas_kernels.quantized_matmul.operands import Operands
from pallas_kernels.quantized_matmul.splits import (
    MAX_SPLITS,
    MIN_STEPS,
    Tiling,
    cost,
    dequantizes,
    number_of_splits,
)
from tests.pallas_kernels.lowering import A100, H200
from tests.pallas_kernels.quantized_matmul.lowering import abstract_weight

# products of Llama-3-8B: outputs, inputs
GATE_UP, QKV, OUTPUT, DOWN, LM_HEAD = (
    (28672, 4096), (6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096),
)  # fmt: skip


def on(device: AbstractDevice):
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def mosaic_gpu_splits(rows: int, product: tuple[int, int], kind: str = "int4 128") -> int:
    outputs, inputs = product
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    weight = abstract_weight(outputs, inputs, kind)
    with on(H200):
        return mosaic_gpu_plan.plan_of(Operands.of(x, weight), None, staged=False).splits


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_parts_that_cost_more_than_they_bring_are_not_made(rows):
    """224 tiles on 132 multiprocessors: two waves of 1.7, and four parts as large as the weight."""
    assert mosaic_gpu_splits(rows, GATE_UP) == 1


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(
    ("product", "splits"), [(QKV, 2), (OUTPUT, 4), (DOWN, 4), (LM_HEAD, 1)], ids=str
)
def test_few_tiles_are_divided_and_many_are_not(rows, product, splits):
    assert mosaic_gpu_splits(rows, product) == splits


@pytest.mark.parametrize("product", [GATE_UP, QKV, OUTPUT, DOWN, LM_HEAD], ids=str)
def test_a_prefill_region_needs_no_parts(product):
    """Row tiles alone fill the device."""
    assert mosaic_gpu_splits(2048, product) == 1


def test_the_same_tiles_are_divided_for_few_rows_and_not_for_many():
    few, many = (
        Tiling(rows=rows, outputs=8192, tiles=64, steps=16, step_bytes=16384) for rows in (8, 2048)
    )
    assert number_of_splits(few, 132) == 2
    assert number_of_splits(many, 132) == 1


def test_the_number_of_multiprocessors_is_the_devices():
    def traced(device: AbstractDevice) -> int:
        with on(device):
            return multiprocessors()

    assert (traced(H200), traced(A100)) == (132, 108)
    assert traced(AbstractDevice("NVIDIA H20", 78, "gpu")) == 78
    assert traced(AbstractDevice("TPU v5p", 2, "tpu")) == 1
    assert multiprocessors() == 1, "the CPU that runs the tests interprets block after block"


def test_a_smaller_gpu_divides_less():
    x = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
    weight = abstract_weight(2048, 4096, "int4 128")

    def splits(device: AbstractDevice) -> int:
        with on(device):
            return triton.plan_of(Operands.of(x, weight), None).splits

    assert splits(A100) > splits(AbstractDevice("NVIDIA A30", 56, "gpu"))


@given(
    tiles=st.integers(1, 2000),
    steps=st.integers(1, 120),
    rows=st.integers(1, 4096),
    count=st.sampled_from((1, 10, 58, 108, 132, 148)),
)
def test_no_part_is_empty_and_none_would_be_cheaper(tiles, steps, rows, count):
    tiling = Tiling(rows, 128 * tiles, tiles, steps, 16384)
    splits = number_of_splits(tiling, count)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or steps // splits >= MIN_STEPS
    assert (splits - 1) * -(-steps // splits) < steps, "an empty part"
    assert cost(tiling, splits, count) <= cost(tiling, 1, count)


def test_a_weight_is_dequantised_where_tiles_would_convert_it_often():
    """By the estimate four conversions of 112 rows' tiles cost what one and its bytes do."""
    assert [rows for rows in (16, 256, 336, 337, 2304) if dequantizes(rows, 112)] == [337, 2304]
    assert [rows for rows in (64, 192, 193, 256) if dequantizes(rows, 64)] == [193, 256]

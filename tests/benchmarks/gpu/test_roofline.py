"""The least time of a step: each operation by its bytes or its FLOPs, whichever take longer."""

from __future__ import annotations

import pytest

from benchmarks.gpu.roofline import ATTENTION, PRODUCTS, least_by_kind, operations
from benchmarks.kernel_bench.rows import Ceilings
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES

H200 = Ceilings(copy_gb_s=4200.0, matmul_tflop_s=790.0)
LLAMA = model_config_of(SHAPES["llama-3-8b"])


def least(rows: int, tokens: int = 0) -> dict[str, float]:
    return least_by_kind(operations(LLAMA, rows, rows * tokens), H200)


def test_few_rows_are_bound_by_the_weights():
    weights = 2 * (8.03e9 - 128256 * 4096)  # the embedding table is read by row
    assert least(1)[PRODUCTS] == pytest.approx(weights / 4200e9, rel=0.01)
    assert least(16)[PRODUCTS] == pytest.approx(least(1)[PRODUCTS], rel=0.03)


def test_many_rows_are_bound_by_flops():
    flops = 2 * 512 * (8.03e9 - 128256 * 4096)
    assert least(512)[PRODUCTS] == pytest.approx(flops / 790e12, rel=0.01)
    assert least(512)[PRODUCTS] > 2.4 * least(1)[PRODUCTS]


def test_each_operation_counts_by_itself():
    # at 205 rows some products are bound by bytes and others by FLOPs: the sum is above both
    found = operations(LLAMA, 205, 0)
    moved = sum(o.count * H200.seconds(o.moved, 0) for o in found)
    flops = sum(o.count * H200.seconds(0, o.flops) for o in found)
    assert sum(least(205).values()) > max(moved, flops)


def test_attention_reads_every_token_once():
    by_hand = 64 * 4096 * 131072 / 4200e9  # bytes a token in all layers
    assert least(64, 4096)[ATTENTION] == pytest.approx(by_hand, rel=0.01)


def test_quantised_weights_and_pages_are_read_as_they_are_stored():
    kept = least_by_kind(operations(LLAMA, 1, 4096, weight=0.5, page=1.0), H200)
    head = 2 * 128256 * 4096 / 4200e9
    assert kept[PRODUCTS] - head == pytest.approx((least(1)[PRODUCTS] - head) / 4, rel=0.01)
    assert kept[ATTENTION] == pytest.approx(least(1, 4096)[ATTENTION] / 2, rel=0.01)


def test_a_sparse_model_reads_at_least_the_experts_of_one_token():
    sparse = model_config_of(SHAPES["qwen3-moe-3b"])
    by_name = {o.name: o for o in operations(sparse, 64, 0)}
    one = 2 * 1408 * 2048
    assert by_name["gate_up"].moved == 2 * 4 * one + 2 * 64 * 4 * (2 * 1408 + 2048)
    assert by_name["gate_up"].flops == 2 * 64 * 4 * one

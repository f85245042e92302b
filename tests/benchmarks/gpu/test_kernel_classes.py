"""Kernels of a trace by class, as XLA, cuBLAS and our own kernels are named."""

from __future__ import annotations

import pytest

from benchmarks.device_trace import summed
from benchmarks.gpu.kernel_classes import OTHER, by_class, class_of
from benchmarks.gpu.roofline import ATTENTION, PRODUCTS


@pytest.mark.parametrize(
    "kernel, wanted",
    [
        ("paged_decode", ATTENTION),
        ("paged_decode_merge", ATTENTION),
        ("nvjet_hsh_64x8_64x16_1x2_h_bz_TNT", PRODUCTS),
        ("gemm_fusion_dot_17", PRODUCTS),
        ("cublasLt::splitKreduce_kernel<32, 16, int>", PRODUCTS),
        ("quantized_matmul", PRODUCTS),
        ("input_scatter_fusion_2", "KV write"),
        ("loop_dynamic_update_slice_fusion", "KV write"),
        ("input_reduce_fusion", "reductions"),
        ("MemcpyD2D", "copies"),
        ("loop_multiply_fusion", "other fusions"),
        ("rotate_and_write", "KV write"),
        ("residual_norm", "reductions"),
        ("sort_12", "sampling"),
        ("ThunkExecutor::Execute", OTHER),
    ],
)
def test_the_class_of_a_kernel(kernel, wanted):
    assert class_of(kernel) == wanted


def test_counts_times_and_pauses_are_of_one_step():
    events = [("gemm_1", 0.0, 4e9), ("paged_decode", 6e9, 2e9), ("gemm_2", 8e9, 4e9)]
    found = by_class(summed(events), steps=2)
    assert list(found) == [PRODUCTS, ATTENTION]
    assert (found[PRODUCTS].calls, found[PRODUCTS].seconds) == (1.0, 4.0)
    assert found[PRODUCTS].pauses == 0.0 and found[ATTENTION].pauses == 1.0

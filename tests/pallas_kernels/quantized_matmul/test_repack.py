"""Tensors of AWQ and GPTQ checkpoints, packed here from the formats' definitions."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels import KernelError
from pallas_kernels.quantized_matmul import repack_awq, repack_gptq
from tests.pallas_kernels.quantized_matmul import oracle

INPUTS, OUTPUTS = 256, 24


def words(nibbles: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """int32[R, C / 8]: nibble i of a word is the element order[i] of eight neighbours."""
    packed = np.zeros((nibbles.shape[0], nibbles.shape[1] // 8), np.uint32)
    for i, element in enumerate(order):
        packed |= nibbles[:, element::8].astype(np.uint32) << np.uint32(4 * i)
    return packed.view(np.int32)


def problem(group: int, symmetric: bool = False):
    """Nibbles [K, N], zeros [groups, N], scales [groups, N] and the matrix [K, N] they mean."""
    rng = np.random.default_rng(group)
    nibbles = rng.integers(0, 16, (INPUTS, OUTPUTS))
    zeros = rng.integers(0, 16, (INPUTS // group, OUTPUTS))
    if symmetric:
        zeros[:] = 8
    scales = rng.uniform(0.01, 1, zeros.shape).astype(np.float16)
    of_input = np.arange(INPUTS) // group
    matrix = (nibbles - zeros[of_input]) * scales[of_input].astype(np.float64)
    return nibbles, zeros, scales, matrix


@pytest.mark.parametrize("group", [32, 128, INPUTS])
def test_awq(group):
    nibbles, zeros, scales, matrix = problem(group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    weight = repack_awq(words(nibbles, order), words(zeros, order), scales)
    np.testing.assert_allclose(oracle.dense(weight, INPUTS), matrix.T, rtol=1e-6)
    assert weight.zeros is not None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", [64, INPUTS])
def test_gptq(group, version):
    nibbles, zeros, scales, matrix = problem(group)
    stored = (zeros - 1) % 16 if version == 1 else zeros
    in_order = tuple(range(8))
    qweight = np.ascontiguousarray(words(np.ascontiguousarray(nibbles.T), in_order).T)
    trivial = np.arange(INPUTS) // group
    for g_idx in (None, trivial):
        weight, order = repack_gptq(
            qweight, words(stored, in_order), scales, g_idx, version=version
        )
        assert order is None
        np.testing.assert_allclose(oracle.dense(weight, INPUTS), matrix.T, rtol=1e-6)


def test_gptq_in_order_of_activation_size_wants_its_input_reordered():
    nibbles, zeros, scales, _ = problem(32)
    rng = np.random.default_rng(9)
    g_idx = rng.permutation(np.arange(INPUTS) // 32).astype(np.int32)
    matrix = (nibbles - zeros[g_idx]) * scales[g_idx].astype(np.float64)
    in_order = tuple(range(8))
    qweight = np.ascontiguousarray(words(np.ascontiguousarray(nibbles.T), in_order).T)
    weight, order = repack_gptq(qweight, words((zeros - 1) % 16, in_order), scales, g_idx)
    assert order.dtype == np.int32
    x = rng.standard_normal((3, INPUTS))
    np.testing.assert_allclose(oracle.product(x[:, order], weight), x @ matrix, rtol=1e-6)


def test_symmetric_weights_carry_no_zeros():
    nibbles, zeros, scales, matrix = problem(128, symmetric=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    weight = repack_awq(words(nibbles, order), words(zeros, order), scales)
    assert weight.zeros is None
    np.testing.assert_allclose(oracle.dense(weight, INPUTS), matrix.T, rtol=1e-6)


def test_what_does_not_fit_is_refused_by_name():
    nibbles, zeros, scales, _ = problem(64)
    order = tuple(range(8))
    qweight, qzeros = words(nibbles, order), words(zeros, order)
    with pytest.raises(KernelError, match="qweight=int64"):
        repack_awq(qweight.astype(np.int64), qzeros, scales)
    with pytest.raises(KernelError, match=r"scales\.shape"):
        repack_awq(qweight, qzeros, scales[:, :8])
    with pytest.raises(KernelError, match=r"qzeros\.shape"):
        repack_awq(qweight, qzeros[:2], scales)
    with pytest.raises(KernelError, match="group=16"):
        repack_awq(qweight[:64], qzeros, scales)
    gptq = np.ascontiguousarray(words(np.ascontiguousarray(nibbles.T), order).T)
    with pytest.raises(KernelError, match="version=3"):
        repack_gptq(gptq, qzeros, scales, version=3)
    uneven = np.zeros(INPUTS, np.int32)
    with pytest.raises(KernelError, match="g_idx"):
        repack_gptq(gptq, qzeros, scales, uneven)

"""Stored weights: the layout of 4-bit weights, and rounding to each format."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError
from pallas_kernels.quantized_matmul import (
    dequantize,
    formats,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from tests.pallas_kernels.quantized_matmul import oracle


@pytest.mark.parametrize("inputs", [512, 320])
def test_the_layout_of_packed_words(inputs):
    nibbles = np.random.default_rng(0).integers(0, 16, (3, inputs)).astype(np.uint8)
    packed = formats.pack_int4(nibbles)
    assert isinstance(packed, np.ndarray)
    assert packed.dtype == np.uint16
    assert packed.shape == (3, formats.packed_columns(inputs))
    np.testing.assert_array_equal(oracle.unpacked(packed, inputs), nibbles)
    np.testing.assert_array_equal(formats.unpack_int4(jnp.asarray(packed), inputs), nibbles)
    np.testing.assert_array_equal(formats.pack_int4(jnp.asarray(nibbles)), packed)


@pytest.mark.parametrize("kind", ["int4 128 zeros", "int4 row", "fp8 tensor"])
def test_dequantize_is_the_definition(kind):
    inputs = 384
    weight = oracle.random_weight(np.random.default_rng(1), 9, inputs, kind)
    want = oracle.dense(weight, inputs)
    assert oracle.relative_error(dequantize(weight, inputs), want) <= 1e-6


def test_rounding_is_to_the_nearest_of_what_the_format_has():
    matrix = np.random.default_rng(2).standard_normal((8, 256)).astype(np.float32)
    weight = quantize_int8(jnp.asarray(matrix))
    step = np.asarray(weight.scale)[:, None]
    assert (np.abs(oracle.dense(weight, 256) - matrix) <= step * 0.5001).all()
    assert np.abs(np.asarray(weight.values)).max(axis=1).tolist() == [127] * 8
    for group, asymmetric in ((32, False), (128, True)):
        weight = quantize_int4(jnp.asarray(matrix), group, asymmetric=asymmetric)
        step = np.repeat(np.asarray(weight.scales), 256 // weight.scales.shape[0], axis=0).T
        # a rounded zero point may move the ends of an asymmetric range by half a step
        slack = 1.0001 if asymmetric else 0.5001
        assert (np.abs(oracle.dense(weight, 256) - matrix) <= step * slack).all()
        assert (weight.zeros is not None) == asymmetric
    weight = quantize_fp8(jnp.asarray(matrix))
    error = np.abs(oracle.dense(weight, 256) - matrix)
    # 3 bits of mantissa; below 2^-6 the spacing is 2^-9
    spacing = np.maximum(np.abs(matrix) / 16, np.asarray(weight.scale)[:, None] * 2.0**-10)
    assert (error <= spacing * 1.0001).all()


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4, quantize_fp8])
def test_zeros_stay_zeros(quantize):
    weight = quantize(jnp.zeros((4, 128)))
    assert not oracle.dense(weight, 128).any()


def test_what_cannot_be_quantised_is_refused_by_name():
    with pytest.raises(KernelError, match="group=128"):
        quantize_int4(jnp.zeros((4, 192)))
    with pytest.raises(KernelError, match="group=16"):
        quantize_int4(jnp.zeros((4, 256)), 16)
    with pytest.raises(KernelError, match=r"weight=int32\(4, 128\)"):
        quantize_int8(jnp.zeros((4, 128), jnp.int32))


@pytest.mark.parametrize(
    ("inputs", "groups", "words", "group"),
    [(128, 4, 64, 32), (64, 2, 64, 32), (320, 5, 128, 64), (704, 16, 256, 64), (384, 3, None, 128)],
)
def test_only_rows_that_are_filled_up_have_further_groups(inputs, groups, words, group):
    assert formats.group_of(inputs, groups, words) == group

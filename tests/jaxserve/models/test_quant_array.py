"""Weights of few bits as one parameter: what is kept is what was given."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.quantized import Encoding
from jaxserve.models.quant_array import QuantArray, WeightFormat
from pallas_kernels.grouped_linear import grouped_linear
from pallas_kernels.quantized_matmul import Int4Weight

EXPERTS, OUTPUTS = 3, 128


@pytest.mark.parametrize(
    ("inputs", "parts", "columns", "groups"),
    [(768, 1, 256, 8), (1024, 1, 256, 8), (1536, 2, 512, 16)],
)
@pytest.mark.parametrize("zeros", ["none", "integer"])
def test_rows_of_experts_are_filled_up(
    inputs: int, parts: int, columns: int, groups: int, zeros: str
) -> None:
    """With their scales; what they stand for is the same, and so is what is read back."""
    rng = np.random.default_rng(0)
    stored = Encoding("int4", 128, zeros=zeros)
    format = WeightFormat(stored, native=False, parts=parts, experts=True, words=128)
    elements = rng.integers(0, 16, (EXPERTS, OUTPUTS, inputs)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (EXPERTS, OUTPUTS, inputs // 128)).astype(np.float32)
    offsets = None
    if zeros != "none":
        offsets = rng.integers(0, 17, scales.shape).astype(np.uint8)
    empty = QuantArray.empty((EXPERTS, OUTPUTS, inputs), format)
    rows = elements.reshape(-1, inputs), scales.reshape(EXPERTS * OUTPUTS, -1)
    kept, kept_zeros = format.as_kept(*rows, offsets)
    kept = kept.reshape(EXPERTS, OUTPUTS, -1)
    array = jax.tree.map(jnp.asarray, empty.with_arrays(kept, scales, kept_zeros, None, None))
    assert array.values.shape == empty.values.shape == (EXPERTS, OUTPUTS, columns)
    assert array.scale.shape == empty.scale.shape == (EXPERTS, groups, OUTPUTS)

    found, found_scales, found_zeros = array.stored_arrays()
    np.testing.assert_array_equal(found, elements)
    np.testing.assert_array_equal(found_scales, scales)
    assert (found_zeros is None) == (offsets is None)
    if offsets is not None:
        np.testing.assert_array_equal(found_zeros, offsets)

    middle = 8.0 if offsets is None else np.repeat(offsets, 128, axis=2).astype(np.float64)
    want = (elements - middle) * np.repeat(scales, 128, axis=2)
    np.testing.assert_allclose(array.dequantize(), want, rtol=1e-6)
    if parts > 1:
        return  # a device has one
    weight = array.operand_of_groups()
    assert isinstance(weight, Int4Weight)
    x = rng.normal(size=(9, inputs)).astype(np.float32)
    sizes = (4, 0, 5)
    product = np.concatenate([x[:4] @ want[0].T, x[4:] @ want[2].T])
    for backend, interpret in (("mosaic_tpu", True), ("xla", None)):
        out = grouped_linear(
            jnp.asarray(x),
            weight,
            jnp.asarray(sizes, jnp.int32),
            backend=backend,
            interpret=interpret,
        )
        np.testing.assert_allclose(out, product, rtol=0, atol=2e-5 * np.abs(product).max())


def test_a_device_has_whole_vectors_of_words() -> None:
    """768 inputs of each of two devices are filled up, where 1,024 are not."""
    format = WeightFormat(Encoding("int4", 128), native=False, experts=True, words=128)
    assert format.divided(1536, 2) == replace(format, parts=2)
    assert format.divided(2048, 2) == format

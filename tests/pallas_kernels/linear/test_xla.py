"""Linear layers and the RMS norm in XLA against float64 NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from pallas_kernels.linear import Norm, as_stored_weight, linear
from pallas_kernels.linear.xla import rms_norm
from tests.pallas_kernels.linear.checks import at_boundaries, check, layers
from tests.pallas_kernels.strategies import examples

RNG = np.random.default_rng(0)


@at_boundaries
@examples(2)
@given(layer=layers(("bfloat16", "float32", "float16")))
def test_linear(layer):
    check(layer, "xla", slack=2)  # gate, product and sum are rounded one after the other


def test_both_forms_of_8_bit_weights_are_the_same_numbers():
    values = jnp.asarray(RNG.integers(-127, 128, (6, 32)), jnp.int8)
    shifted = as_stored_weight(values, "uint8")
    np.testing.assert_array_equal(np.asarray(shifted, int), np.asarray(values, int) + 128)
    np.testing.assert_array_equal(as_stored_weight(shifted, "int8"), values)
    x, scale = jnp.asarray(RNG.normal(size=(3, 32)), jnp.float32), jnp.ones(6)
    products = [linear(x, weight, scale=scale, backend="xla") for weight in (values, shifted)]
    np.testing.assert_array_equal(*products)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_rms_norm(dtype: str, tolerance: float) -> None:
    # Squares of these values overflow float16 and lose bits in bfloat16.
    x = jnp.asarray(300 * RNG.normal(size=(4, 64)), dtype)
    weight = jnp.asarray(RNG.normal(size=64), dtype)
    found = rms_norm(x, Norm(weight, 1e-5))
    assert found.dtype == dtype
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected * np.asarray(weight, np.float64), rtol=tolerance
    )


def test_rms_norm_epsilon() -> None:
    found = rms_norm(jnp.zeros((1, 8)), Norm(jnp.ones(8), 1e-5))
    np.testing.assert_array_equal(found, 0.0)
    small = rms_norm(jnp.full((1, 8), 1e-3), Norm(jnp.ones(8), 1e-6))
    np.testing.assert_allclose(small, 1e-3 / np.sqrt(2e-6), rtol=1e-6)

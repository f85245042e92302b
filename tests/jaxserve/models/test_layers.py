"""The building blocks against float64 NumPy, and the form in which matmuls reach the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.layers import project, rms_norm

RNG = np.random.default_rng(0)


def test_project_contracts_last_axes() -> None:
    x, weight = RNG.normal(size=(5, 32)), RNG.normal(size=(3, 2, 7, 32))
    found = project(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32))
    assert found.shape == (5, 3, 2, 7)
    np.testing.assert_allclose(found, np.einsum("ti,...i->t...", x, weight), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", jax.lax.Precision.HIGHEST), ("bfloat16", None)]
)
def test_project_asks_for_one_plain_matmul(dtype: str, precision: jax.lax.Precision | None) -> None:
    """Two axes a side and a float32 result: anything else is slow on CPU or inexact on GPU."""
    x, weight = jnp.zeros((5, 32), dtype), jnp.zeros((3, 2, 32), dtype)
    equations = jax.make_jaxpr(project)(x, weight).jaxpr.eqns
    (dot,) = (equation for equation in equations if equation.primitive.name == "dot_general")
    assert [variable.aval.shape for variable in dot.invars] == [(5, 32), (6, 32)]
    assert dot.params["dimension_numbers"] == (((1,), (1,)), ((), ()))
    assert dot.params["precision"] in (precision, precision and (precision, precision))
    assert dot.params["preferred_element_type"] == jnp.float32


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_rms_norm(dtype: str, tolerance: float) -> None:
    # Squares of these values overflow float16 and lose bits in bfloat16.
    x = jnp.asarray(300 * RNG.normal(size=(4, 64)), dtype)
    weight = jnp.asarray(RNG.normal(size=64), dtype)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected * np.asarray(weight, np.float64), rtol=tolerance
    )


def test_rms_norm_epsilon() -> None:
    found = rms_norm(jnp.zeros((1, 8)), jnp.ones(8), 1e-5)
    np.testing.assert_array_equal(found, 0.0)
    small = rms_norm(jnp.full((1, 8), 1e-3), jnp.ones(8), 1e-6)
    np.testing.assert_allclose(small, 1e-3 / np.sqrt(2e-6), rtol=1e-6)

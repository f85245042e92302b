"""Native linear layers against float64 NumPy, for every remainder of rows, inputs and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from pallas_kernels import KernelError, quantize_int8
from pallas_kernels.linear import linear
from pallas_kernels.linear import native as native_linear
from tests.pallas_kernels.linear.checks import check, layers, problem
from tests.pallas_kernels.native.requirements import require_native
from tests.pallas_kernels.strategies import examples

require_native()


@examples(20)
@given(layer=layers(("bfloat16", "float32")))
def test_against_float64(layer):
    check(layer, "native")


def test_int8_largest_sums_are_exact():
    """127 * 127 * inputs, of both signs, and a row of zeros."""
    inputs = 4096
    x = jnp.stack([jnp.ones(inputs), -jnp.ones(inputs), jnp.zeros(inputs)])
    values = jnp.full((16, inputs), 127, jnp.int8)
    found = linear(x, values, scale=jnp.ones(16), backend="native")
    want = np.repeat([[127.0 * inputs], [-127.0 * inputs], [0.0]], 16, axis=1)
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    rng = np.random.default_rng(2)
    x, weight, _ = problem(rng, (21, 200, 64), "bfloat16" if dtype == "int8" else dtype, "plain")
    scale = None
    if dtype == "int8":
        weight, scale = quantize_int8(weight)
    together = linear(x, weight, scale=scale, out_dtype="float32", backend="native")
    for rows in (1, 2, 7, 16):
        part = linear(x[:rows], weight, scale=scale, out_dtype="float32", backend="native")
        np.testing.assert_array_equal(part, together[:rows])


def test_many_rows_go_to_xla_where_it_is_faster(monkeypatch):
    rng = np.random.default_rng(3)
    x, weight, _ = problem(rng, (8, 64, 32), "float32", "plain")
    monkeypatch.setattr("pallas_kernels.native.linear_rows", lambda: 4)
    run = lambda x: native_linear.linear(  # noqa: E731
        x, weight, scale=None, bias=None, norm=None, residual=None, gated=False,
        out_dtype=jnp.dtype("float32"),
    )  # fmt: skip
    assert "jaxserve_linear" not in str(jax.make_jaxpr(run)(x))
    assert "jaxserve_linear" in str(jax.make_jaxpr(run)(x[:4]))


def test_float16_weights_are_refused():
    x = jnp.zeros((2, 64), jnp.float16)
    with pytest.raises(KernelError, match=r"weight\.dtype=float16.*bfloat16, float32, int8"):
        linear(x, x, backend="native")

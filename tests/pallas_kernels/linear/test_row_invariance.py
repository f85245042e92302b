"""Native linear layers in one order of summation: rows do not depend on those beside them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, quantize_int8
from pallas_kernels.grouped_linear import grouped_linear
from pallas_kernels.linear import Norm, as_stored_weight, linear
from pallas_kernels.linear import native as native_linear
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.native.paths import Path
from tests.pallas_kernels.linear.checks import to64
from tests.pallas_kernels.linear.test_native_groups import weight_of
from tests.pallas_kernels.native.requirements import require_native

require_native()

ROWS = (1, 2, 8, 9, 16, 17, 33, 61)


def operands(dtype: str, rows: int, inputs: int, outputs: int):
    rng = np.random.default_rng(rows)
    floats = "float32" if dtype == "float32" else "bfloat16"
    x = jnp.asarray(rng.normal(size=(rows, inputs)), floats)
    weight = jnp.asarray(rng.normal(size=(outputs, inputs)), floats)
    if dtype != "int8":
        return x, weight, None
    values, scale = quantize_int8(weight)
    return x, as_stored_weight(values, "uint8"), scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_row_alone_is_the_row_among_others(dtype):
    x, weight, scale = operands(dtype, 61, 200, 50)
    of = lambda x: linear(  # noqa: E731
        x, weight, scale=scale, out_dtype="float32", row_invariant=True, backend="native"
    )
    whole = of(x)
    for rows in ROWS:
        np.testing.assert_array_equal(of(x[:rows]), whole[:rows])
        np.testing.assert_array_equal(of(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_alone_is_the_norm_among_others(dtype):
    x, _, _ = operands(dtype, 61, 203, 1)
    norm = Norm(jnp.asarray(np.random.default_rng(2).normal(size=203), x.dtype), 1e-5)
    whole = native_linear.native_norm(x, norm)
    assert whole.dtype == x.dtype
    wanted, tolerance = rms_norm(x, norm), 1e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(to64(whole), to64(wanted), rtol=tolerance, atol=tolerance)
    for rows in ROWS:
        np.testing.assert_array_equal(native_linear.native_norm(x[:rows], norm), whole[:rows])
    heads = native_linear.native_norm(x[:60].reshape(4, 15, 203), norm)
    np.testing.assert_array_equal(heads.reshape(60, 203), whole[:60])


@pytest.mark.parametrize(
    ("dtype", "gated"),
    [
        ("float32", False),
        ("bfloat16", True),
        ("int8", True),
        pytest.param("float32", True, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
        pytest.param("int8", False, marks=pytest.mark.slow),
    ],
)
def test_few_rows_end_as_many_do(dtype, gated):
    """Up to 8 rows meet the weight by turned words; what is done around a product is the same."""
    x, weight, scale = operands(dtype, 40, 203, 50)
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.normal(size=50), x.dtype)
    norm = Norm(jnp.asarray(rng.normal(size=203), x.dtype), 1e-5)
    residual = jnp.asarray(rng.normal(size=(40, 25 if gated else 50)), x.dtype)
    options = {"scale": scale, "bias": bias, "norm": norm, "gated": gated}
    options |= {"row_invariant": True, "backend": "native"}

    def of(begin: int, end: int):
        return linear(x[begin:end], weight, residual=residual[begin:end], **options)

    whole = of(0, 40)
    for rows in range(1, 10):
        np.testing.assert_array_equal(of(3, 3 + rows), whole[3 : 3 + rows])


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_so_it_is_with_weights_in_groups(activations):
    weight, _ = weight_of("int4", 48, 256, 64, True)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(61, 256)), jnp.bfloat16)
    of = lambda x: linear(  # noqa: E731
        x,
        weight,
        activations=activations,
        out_dtype="float32",
        row_invariant=True,
        backend="native",
    )
    whole = of(x)
    for rows in ROWS:
        np.testing.assert_array_equal(of(x[:rows]), whole[:rows])


def test_so_it_is_among_experts():
    x, weight, _ = operands("bfloat16", 40, 96, 32)
    of = lambda x, sizes: grouped_linear(  # noqa: E731
        x,
        jnp.stack([weight, -weight]),
        jnp.asarray(sizes, jnp.int32),
        out_dtype="float32",
        row_invariant=True,
        backend="native",
    )
    alone = of(x[:1], (1, 0))
    np.testing.assert_array_equal(of(x, (40, 0))[:1], alone)
    np.testing.assert_array_equal(of(x, (12, 28))[:1], alone)


def test_the_paths_agree_but_for_rounding():
    x, weight, _ = operands("bfloat16", 20, 200, 50)
    given = {"scale": None, "bias": None, "norm": None, "residual": None, "gated": False}
    wanted = to64(x) @ to64(weight).T
    for path in (Path.BY_ROWS, Path.ONE_ORDER, Path.DOTS, Path.LANES):
        found = native_linear.linear(x, weight, out_dtype=jnp.dtype("float32"), path=path, **given)
        np.testing.assert_allclose(found, wanted, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows_that_threads_prepare_are_those_that_one_does(dtype):
    """Up to 8 rows are prepared by the caller, more by all threads; an odd depth copies them."""
    x, weight, scale = operands(dtype, 61, 203, 50)
    given = {"bias": None, "norm": None, "residual": None, "gated": False, "path": Path.DOTS}
    of = lambda x: native_linear.linear(  # noqa: E731
        x, weight, scale=scale, out_dtype=jnp.dtype("float32"), **given
    )
    alone = [of(x[begin : begin + 8]) for begin in range(0, 61, 8)]
    np.testing.assert_array_equal(of(x), np.concatenate(alone))


@pytest.mark.parametrize("backend", ["xla", "gpu"])
def test_other_backends_refuse(backend):
    x, weight, _ = operands("float32", 2, 64, 16)
    with pytest.raises(KernelError, match=r"row_invariant=True.*native"):
        linear(x, weight, row_invariant=True, backend=backend)

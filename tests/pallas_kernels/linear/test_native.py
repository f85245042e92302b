"""Native linear layers against float64 NumPy, for every remainder of rows, inputs and outputs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError
from pallas_kernels.linear import Norm, linear, quantize_rows
from tests.pallas_kernels.native.requirements import require_native

require_native()
# rows, inputs, outputs: tiles of 4, 2, 1 and 16 rows, remainders, ends inside a vector or block
SIZES = [
    (1, 768, 64),
    (2, 64, 48),
    (3, 100, 30),
    (5, 96, 50),
    (17, 70, 100),
    (130, 256, 34),
]
TOLERANCE = {"bfloat16": 8e-3, "float32": 2e-6}
OPTIONS = ("plain", "bias", "norm", "residual", "gated")


def options_of(size: tuple[int, int, int]) -> tuple[str, str]:
    """Everything together, and one option alone: each of them with some of the sizes."""
    return "all", OPTIONS[SIZES.index(size) % len(OPTIONS)]


def to64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def problem(rng, size, dtype, option):
    rows, inputs, outputs = size
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    width = outputs // 2 if option in ("gated", "all") else outputs
    given = {
        "bias": draw(outputs),
        "norm": Norm(1 + 0.1 * draw(inputs), 1e-5),
        "residual": draw(rows, width),
        "gated": True,
    }
    chosen = given if option == "all" else {k: v for k, v in given.items() if k == option}
    return draw(rows, inputs), 0.05 * draw(outputs, inputs), chosen


def expected(x, weight, options, int8: bool) -> np.ndarray:
    """Float64, on activations rounded where the kernel rounds them."""
    rows = to64(x)
    if "norm" in options:
        norm = options["norm"]
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + norm.eps)
        rows = to64(jnp.asarray(rows, x.dtype)) * to64(norm.weight)
    if int8:
        scale = np.abs(rows).max(-1, keepdims=True) / 127
        rows = np.round(rows / scale) * scale
    out = rows @ weight.T
    if "bias" in options:
        out = out + to64(options["bias"])
    if "gated" in options:
        gate = out[:, ::2]
        out = gate / (1 + np.exp(-gate)) * out[:, 1::2]
    return out + to64(options.get("residual", 0.0))


def error(found, want) -> float:
    return float(np.abs(to64(found) - want).max() / np.abs(want).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_float64(size, dtype):
    rng = np.random.default_rng(0)
    for option in options_of(size):
        x, weight, options = problem(rng, size, dtype, option)
        found = linear(x, weight, backend="native", **options)
        assert found.dtype == x.dtype
        assert error(found, expected(x, to64(weight), options, False)) <= TOLERANCE[dtype], option


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_int8_against_float64(size):
    rng = np.random.default_rng(1)
    for option in options_of(size):
        x, weight, options = problem(rng, size, "bfloat16", option)
        values, scale = quantize_rows(weight)
        found = linear(x, values, scale=scale, backend="native", **options)
        want = expected(x, to64(values) * to64(scale)[:, None], options, True)
        # a value on the edge between two integers may fall to either side
        assert error(found, want) <= 1.5e-2, option


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
    """Among few rows, and among many."""
    rng = np.random.default_rng(2)
    x, weight, _ = problem(rng, (61, 200, 64), "bfloat16" if dtype == "int8" else dtype, "plain")
    scale = None
    if dtype == "int8":
        weight, scale = quantize_rows(weight)
    of = lambda x: linear(x, weight, scale=scale, out_dtype="float32", backend="native")  # noqa: E731
    for most, fewer in (8, (1, 2, 7)), (61, (9, 16, 40)):
        together = of(x[:most])
        for rows in fewer:
            np.testing.assert_array_equal(of(x[:rows]), together[:rows])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("ranges", [[(0, 3)], [(2, 5), (9, 12)], [(0, 1), (4, 40)], [(7, 7)]])
def test_only_live_rows_are_computed(dtype, ranges):
    """Rows that do not count may hold anything; they cost nothing and come out as zeros."""
    rng = np.random.default_rng(3)
    size = (40, 96, 50)
    x, weight, options = problem(rng, size, "bfloat16" if dtype == "int8" else dtype, "all")
    scale = None
    if dtype == "int8":
        weight, scale = quantize_rows(weight)
    rows = np.concatenate([np.arange(*r) for r in ranges]).astype(int)
    dead = np.setdiff1d(np.arange(size[0]), rows)
    whole = {**options, "scale": scale, "backend": "native"}
    want = linear(x[rows], weight, **{**whole, "residual": options["residual"][rows]})
    found = linear(x.at[dead].set(jnp.nan), weight, live=jnp.asarray(ranges, jnp.int32), **whole)
    np.testing.assert_array_equal(to64(found)[rows], to64(want))
    np.testing.assert_array_equal(to64(found)[dead], 0.0)


def test_live_ranges_of_another_type_are_refused():
    x = jnp.zeros((2, 64))
    with pytest.raises(KernelError, match=r"live=int32\(2,\).*int32\[ranges, 2\]"):
        linear(x, x, live=jnp.zeros(2, jnp.int32), backend="native")


def test_float16_weights_are_refused():
    x = jnp.zeros((2, 64), jnp.float16)
    with pytest.raises(KernelError, match=r"weight\.dtype=float16.*bfloat16, float32, int8"):
        linear(x, x, backend="native")

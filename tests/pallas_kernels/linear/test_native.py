"""Native linear layers against float64 NumPy, for every remainder of rows, inputs and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_kernels import KernelError, quantize_int8
from pallas_kernels.linear import Norm, as_stored_weight, linear
from tests.pallas_kernels.linear.checks import at_boundaries, check, layers, problem, to64
from tests.pallas_kernels.native.requirements import require_native
from tests.pallas_kernels.strategies import SEEDS, examples, numbers

require_native()


def stored(weight):
    """Rounded to 8 bits, in the form that the kernel takes, and the scales."""
    values, scale = quantize_int8(weight)
    return as_stored_weight(values, "uint8"), scale


@at_boundaries
@examples(4)
@given(layer=layers(("bfloat16", "float32")))
def test_against_float64(layer):
    check(layer, "native")


def test_int8_largest_sums_are_exact():
    """127 * 127 * inputs, of both signs, and a row of zeros."""
    inputs = 4096
    x = jnp.stack([jnp.ones(inputs), -jnp.ones(inputs), jnp.zeros(inputs)])
    values = jnp.full((16, inputs), 127 + 128, jnp.uint8)
    found = linear(x, values, scale=jnp.ones(16), backend="native")
    want = np.repeat([[127.0 * inputs], [-127.0 * inputs], [0.0]], 16, axis=1)
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@examples(2)
@given(few=numbers((7, 1, 2), most=7), many=numbers((16, 9, 40), most=60, least=9), seed=SEEDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype, few, many, seed):
    """Among few rows, and among many."""
    rng = np.random.default_rng(seed)
    x, weight, _ = problem(rng, (61, 300, 64), "bfloat16" if dtype == "int8" else dtype, "plain")
    scale = None
    if dtype == "int8":
        weight, scale = stored(weight)
    of = lambda x: linear(x, weight, scale=scale, out_dtype="float32", backend="native")  # noqa: E731
    for most, fewer in (8, few), (61, many):
        np.testing.assert_array_equal(of(x[:fewer]), of(x[:most])[:fewer])


def live_ranges(rows: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ascending ranges, also empty ones and neighbours."""
    ends = st.lists(st.integers(0, rows), min_size=2, max_size=6).map(sorted)
    return ends.map(lambda ends: list(zip(ends[::2], ends[1::2])))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow), "int8"]
)
@example(ranges=[(2, 5), (9, 12)], seed=0)
@example(ranges=[(0, 1), (4, 40)], seed=1)
@example(ranges=[(7, 7)], seed=2)
@examples(2)
@given(ranges=live_ranges(40), seed=SEEDS)
@pytest.mark.slow
def test_only_live_rows_are_computed(dtype, ranges, seed):
    """Rows that do not count may hold anything; they cost nothing and come out as zeros."""
    rng = np.random.default_rng(seed)
    size = (40, 96, 50)
    x, weight, options = problem(rng, size, "bfloat16" if dtype == "int8" else dtype, "all")
    scale = None
    if dtype == "int8":
        weight, scale = stored(weight)
    rows = np.concatenate([np.arange(*r) for r in ranges]).astype(int)
    dead = np.setdiff1d(np.arange(size[0]), rows)
    whole = {**options, "scale": scale, "backend": "native"}
    want = linear(x[rows], weight, **{**whole, "residual": options["residual"][rows]})
    found = linear(x.at[dead].set(jnp.nan), weight, live=jnp.asarray(ranges, jnp.int32), **whole)
    np.testing.assert_array_equal(to64(found)[rows], to64(want))
    np.testing.assert_array_equal(to64(found)[dead], 0.0)


@pytest.mark.parametrize("rows", [3, 20])
def test_a_norm_is_rounded_where_the_model_rounds(rows):
    """Before its weight and behind it; rows of the weight with a single one show x as it is."""
    rng = np.random.default_rng(rows)
    x, norm_weight = (jnp.asarray(rng.uniform(0.5, 2, n), "bfloat16") for n in ((rows, 70), 70))
    found = linear(x, jnp.eye(70, dtype="bfloat16"), norm=Norm(norm_weight, 0.1), backend="native")
    wide = to64(x) / np.sqrt((to64(x) ** 2).mean(-1, keepdims=True) + 0.1)
    wanted = jnp.asarray(wide, "bfloat16") * norm_weight
    # the factor is a float32 number, which may turn a tie
    assert (to64(found) != to64(wanted)).mean() <= 0.005


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_result_is_the_nearest_number_of_its_type(dtype, rows):
    """Of the float32 result, in whole vectors and behind them."""
    rng = np.random.default_rng(rows)
    x, weight, _ = problem(rng, (rows, 96, 50), dtype, "plain")
    scale = None
    if dtype == "float16":
        weight, scale = stored(weight)
    exact = linear(x, weight, scale=scale, out_dtype="float32", backend="native")
    found = linear(x, weight, scale=scale, backend="native")
    np.testing.assert_array_equal(to64(found), to64(np.asarray(exact).astype(dtype)))


@pytest.mark.parametrize("rows", [2, 16])
def test_gates_of_any_size(rows):
    """Each result by its own magnitude: a closed gate is not an open one times something small."""
    gate = np.repeat([[-300.0, -95.0, -60.0, -9.0, 0.0, 1.0, 20.0, 300.0]], rows, 0)
    weight = np.repeat(np.eye(8), 2, 0)
    weight[1::2] *= 0.5
    found = linear(jnp.asarray(gate, "float32"), jnp.asarray(weight, "float32"), gated=True,
                   backend="native")  # fmt: skip
    wanted = gate / (1 + np.exp(-gate)) * gate / 2
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("rows", [3, 20])
def test_nothing_behind_the_weight_is_read(rows):
    """A vector of its last row reaches past the end, where NaN lies, which times 0 is NaN."""
    inputs, outputs = 70, 32
    memory = np.full(outputs * inputs + 64, np.nan, np.float32)
    first = -memory.ctypes.data % 64 // 4
    held = memory[first : first + outputs * inputs].reshape(outputs, inputs)
    held[:] = 1.0
    weight = jax.dlpack.from_dlpack(held)
    assert weight.unsafe_buffer_pointer() == held.ctypes.data, "the weight is a copy"
    found = linear(jnp.ones((rows, inputs), "float32"), weight, backend="native")
    np.testing.assert_array_equal(found, 70.0)


def test_live_ranges_of_another_type_are_refused():
    x = jnp.zeros((2, 64))
    with pytest.raises(KernelError, match=r"live=int32\(2,\).*int32\[ranges, 2\]"):
        linear(x, x, live=jnp.zeros(2, jnp.int32), backend="native")


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_other_weights_are_refused(dtype):
    x, weight = jnp.zeros((2, 64), jnp.float16), jnp.zeros((3, 64), dtype)
    scale = jnp.ones(3) if dtype == "int8" else None
    with pytest.raises(KernelError, match=rf"weight\.dtype={dtype}.*bfloat16, float32, uint8"):
        linear(x, weight, scale=scale, backend="native")

"""Linear layers in float64 NumPy, and a backend against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example
from hypothesis import strategies as st

from pallas_kernels import quantize_int8
from pallas_kernels.linear import Norm, as_stored_weight, linear, stored_dtype
from tests.pallas_kernels.strategies import SEEDS, numbers

OPTIONS = ("plain", "bias", "norm", "residual", "gated")
# relative to the largest element of the result
TOLERANCE = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 2e-6}


class Layer(NamedTuple):
    """One call: x [rows, inputs], a weight [outputs, inputs], one option alone or all together."""

    rows: int
    inputs: int
    outputs: int
    dtype: str
    int8: bool
    option: str
    seed: int


# Where the native kernels change their way: 8 rows are the last that are multiplied one by one, 16
# a group, 130 of 768 inputs more than the cache takes at once; a vector has 16, 32 or 64 inputs, a
# block 16 outputs, and one alone is neither.
BOUNDARIES = (
    Layer(9, 70, 50, "bfloat16", True, "all", 0),
    Layer(130, 768, 100, "float32", False, "all", 1),
    Layer(8, 64, 34, "bfloat16", False, "all", 2),
    Layer(7, 1, 17, "float32", True, "residual", 3),
    Layer(33, 33, 1, "bfloat16", False, "bias", 4),
    Layer(16, 256, 48, "float32", True, "gated", 5),
)


def at_boundaries(test: Callable[..., None]) -> Callable[..., None]:
    """Gives a test of `layer` those of `BOUNDARIES` before any other."""
    for layer in reversed(BOUNDARIES):
        test = example(layer=layer)(test)
    return test


@st.composite
def layers(draw: st.DrawFn, dtypes: tuple[str, ...]) -> Layer:
    """Any row tile (16, 4, 2, 1) and remainder, any end inside a vector or a block."""
    option = draw(st.sampled_from(("all", *OPTIONS)))
    outputs = draw(numbers((15, 16, 17, 32, 100), most=100, least=2))
    return Layer(
        rows=draw(numbers((1, 2, 3, 4, 15, 17, 32), most=70)),
        inputs=draw(numbers((63, 64, 65, 15, 31, 128), most=300)),
        outputs=outputs // 2 * 2 if option in ("gated", "all") else outputs,
        dtype=draw(st.sampled_from(dtypes)),
        int8=draw(st.booleans()),
        option=option,
        seed=draw(SEEDS),
    )


def to64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def problem(rng, size, dtype, option) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """x, weight and the chosen options of `linear`."""
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


def check(layer: Layer, backend: str, slack: float = 1.0) -> None:
    """A layer against float64.

    Args:
        slack: how many roundings to the type of x the backend does, where one is enough.
    """
    rng = np.random.default_rng(layer.seed)
    x, weight, options = problem(rng, layer[:3], layer.dtype, layer.option)
    scale, dense = None, to64(weight)
    # a value on the edge between two integers may fall to either side
    bound = max(slack * TOLERANCE[layer.dtype], 1.5e-2 if layer.int8 else 0.0)
    if layer.int8:
        weight, scale = quantize_int8(weight)
        dense = to64(weight) * to64(scale)[:, None]
        weight = as_stored_weight(weight, stored_dtype(backend))
    found = jax.jit(lambda x, w: linear(x, w, scale=scale, backend=backend, **options))(x, weight)
    assert found.dtype == x.dtype
    assert error(found, expected(x, dense, options, layer.int8)) <= bound

"""Linear layers in float64 NumPy, and a backend against them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import quantize_int8
from pallas_kernels.linear import Norm, linear
from tests.pallas_kernels.strategies import SEEDS

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


def layers(dtypes: tuple[str, ...]) -> st.SearchStrategy[Layer]:
    """Each row tile (16, 4, 2, 1) and its remainders, ends inside a vector or a block."""
    return st.builds(
        Layer,
        rows=st.sampled_from((1, 2, 3, 5, 17, 130)),
        inputs=st.sampled_from((64, 70, 96, 100, 256, 768)),
        outputs=st.sampled_from((64, 30, 34, 48, 50, 100)),
        dtype=st.sampled_from(dtypes),
        int8=st.booleans(),
        option=st.sampled_from(("all", *OPTIONS)),
        seed=SEEDS,
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
    found = jax.jit(lambda x, w: linear(x, w, scale=scale, backend=backend, **options))(x, weight)
    assert found.dtype == x.dtype
    assert error(found, expected(x, dense, options, layer.int8)) <= bound

"""Linear layers with quantised weights on a TPU, interpreted, against float64 NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError
from pallas_kernels.linear import Norm, linear
from pallas_kernels.linear.mosaic_tpu import layer
from pallas_kernels.quantized_matmul import Int8Weight, Rounding, tpu_tiles
from tests.pallas_kernels.quantized_matmul import oracle
from tests.pallas_kernels.strategies import SEEDS, examples

TILE = 64  # rows of a block here: more than are normed at once
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """What stands around a product."""

    outputs: int
    inputs: int
    kind: str  # as in `oracle.random_weight`
    rounds: bool = False
    norm: str | None = None  # "plain" or "offset"
    bias: bool = False
    gated: bool = False
    residual: bool = False
    holds: bool = True  # whether rows fit the chip's own memory

    def __str__(self) -> str:
        names = ("rounds", "bias", "gated", "residual", "holds")
        around = [name for name in names if getattr(self, name)]
        return "-".join([f"{self.outputs}x{self.inputs}", self.kind, str(self.norm), *around])


CASES = [
    Case(256, 256, "int8", rounds=True, norm="plain", residual=True),
    Case(256, 512, "int4 128", norm="plain", bias=True, gated=True, residual=True),
]
SLOW_CASES = [
    Case(128, 2304, "int8", rounds=True),
    Case(512, 256, "int8", rounds=True, norm="offset", gated=True),
    Case(512, 4096, "int4 32 zeros", norm="offset", residual=True),
    Case(256, 512, "int4 row", bias=True, gated=True),
    Case(128, 512, "int4 64 bfloat16", norm="plain", gated=True, residual=True),
    Case(256, 2560, "fp8", norm="plain", bias=True),
    Case(256, 256, "int8", rounds=True, norm="plain", bias=True, holds=False),
    Case(256, 256, "int8", norm="plain", gated=True, holds=False),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in SLOW_CASES]


def options_of(case: Case, rng: np.random.Generator, rows: int) -> dict[str, Any]:
    """What `layer` takes around the product, in float32."""
    width = case.outputs // 2 if case.gated else case.outputs
    norm = None
    if case.norm is not None:
        weight = jnp.asarray(rng.uniform(0.5, 2, case.inputs), jnp.float32)
        norm = Norm(weight, EPS, case.norm == "offset")
    bias = jnp.asarray(rng.normal(size=case.outputs) * 9, jnp.float32) if case.bias else None
    residual = jnp.asarray(rng.normal(size=(rows, width)) * 9, jnp.float32)
    return {
        "norm": norm,
        "bias": bias,
        "gated": case.gated,
        "residual": residual if case.residual else None,
        "out_dtype": jnp.dtype("float32"),
    }


def expected(
    x: np.ndarray, weight: Any, case: Case, around: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """float64[M, N] of the layer, and by how much rounded rows may change the product."""
    x, matrix = np.asarray(x, np.float64), oracle.dense(weight, case.inputs)
    if around["norm"] is not None:
        factor = np.asarray(around["norm"].weight, np.float64) + around["norm"].offset
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * factor
    out, bound = x @ matrix.T, np.zeros((len(x), case.outputs))
    if case.rounds:  # each number by half a step of its row's
        bound = np.abs(x).max(axis=1, keepdims=True) / 254 * np.abs(matrix).sum(axis=1)
    if around["bias"] is not None:
        out = out + np.asarray(around["bias"], np.float64)
    if case.gated:
        gate, up = out[:, ::2], out[:, 1::2]
        out = gate / (1 + np.exp(-gate)) * up
        # the slope of silu is 1.1 at most, and its value no more than its argument
        bound = bound[:, ::2] * (1.1 * np.abs(up) + bound[:, 1::2]) + bound[:, 1::2] * np.abs(gate)
    if around["residual"] is not None:
        out = out + np.asarray(around["residual"], np.float64)
    return out, bound


@pytest.mark.parametrize("case", [*(pytest.param(c, id=str(c)) for c in CASES), *SLOW])
@examples(4)
@given(rows=st.integers(1, 2 * TILE + 9), seed=SEEDS)
def test_against_float64(case: Case, rows: int, seed: int) -> None:
    """Rows of any number, of which some are NaN: others do not see them."""
    rng = np.random.default_rng(seed)
    weight = oracle.random_weight(rng, case.outputs, case.inputs, case.kind)
    x = oracle.random_rows(rng, rows, case.inputs, "float32")
    dead = rng.random(rows) < 0.2
    poisoned = jnp.where(jnp.asarray(dead)[:, None], jnp.nan, x)
    around = options_of(case, rng, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_tiles, "TILE_ROWS", TILE)
        if not case.holds:
            patch.setattr(tpu_tiles, "ROWS_BYTES", 0)
        found = layer(poisoned, weight, rounds=case.rounds, **around, interpret=True)
    want, bound = expected(x, weight, case, around)
    assert found.shape == want.shape and found.dtype == jnp.float32
    error = np.abs(np.asarray(found, np.float64) - want)
    largest = np.abs(want).max(axis=1, keepdims=True)
    assert (error <= bound + 2e-5 * largest)[~dead].all()


def test_bfloat16_is_rounded_where_xla_rounds() -> None:
    """The norm, the sum, the gate and the result, each once: at most a unit apart."""
    rng = np.random.default_rng(0)
    case = Case(256, 256, "int8", rounds=True, norm="plain", gated=True, residual=True)
    weight = oracle.random_weight(rng, case.outputs, case.inputs, "int8")
    assert isinstance(weight, Int8Weight)
    x = oracle.random_rows(rng, 9, case.inputs, "bfloat16")
    around = options_of(case, rng, 9)
    norm = around["norm"]._replace(weight=around["norm"].weight.astype(jnp.bfloat16))
    residual = jnp.zeros((9, 128), jnp.bfloat16)
    around |= {"norm": norm, "residual": residual, "out_dtype": jnp.dtype("bfloat16")}
    found = layer(x, weight, rounds=True, **around, interpret=True)
    want = linear(x, weight.values, scale=weight.scale, **around, backend="xla")
    difference = np.abs(np.asarray(found, np.float32) - np.asarray(want, np.float32))
    assert (difference <= 2**-6 * np.abs(np.asarray(want, np.float32)) + 1e-6).mean() > 0.98
    assert difference.max() <= 0.05 * np.abs(np.asarray(want, np.float32)).max()


def test_rows_that_are_rounded_already_are_not_rounded_again() -> None:
    rng = np.random.default_rng(0)
    case = Case(128, 256, "int8", rounds=True)
    weight = oracle.random_weight(rng, case.outputs, case.inputs, "int8")
    x = oracle.random_rows(rng, 5, case.inputs, "float32")
    around = options_of(case, rng, 5)
    once = layer(x, weight, rounds=True, **around, interpret=True)
    again = layer(Rounding("int8").of(x), weight, rounds=True, **around, interpret=True)
    np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "options", "field"),
    [
        ("int8", 0, 256, {}, "x.shape"),
        ("int8", 4, 128, {}, "weight.values"),
        ("int4 64", 4, 320, {}, "weight.packed"),
        ("int8", 4, 256, {"activations": "int4"}, "activations"),
        ("int4 64", 4, 256, {"activations": "int8"}, "activations"),
        ("fp8", 4, 256, {"activations": "int8"}, "activations"),
        ("int8", 4, 256, {"activations": "fp8"}, "activations"),
        ("int8", 4, 256, {"cut": 64}, "weight.scale"),
        ("int4 64", 4, 256, {"cut": 64}, "weight.scales"),
    ],
    ids=str,
)
def test_refusals_are_those_of_the_product(
    kind: str, rows: int, inputs: int, options: dict[str, Any], field: str
) -> None:
    given = dict(options)
    weight: Any = oracle.random_weight(np.random.default_rng(0), 128, 256, kind)
    if cut := given.pop("cut", None):
        weight = weight._replace(**{field.removeprefix("weight."): weight[1][..., :cut]})
    x = jnp.zeros((rows, inputs), jnp.bfloat16)
    with pytest.raises(KernelError) as caught:
        linear(x, weight, matmul=("mosaic_tpu",), backend="xla", **given)
    assert caught.value.field == field

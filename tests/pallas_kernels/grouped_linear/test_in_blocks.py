"""Experts by blocks on a TPU, interpreted: routing, and both products, against float64 NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear import block_sizes, linear_in_blocks, mosaic_tpu
from pallas_kernels.route import route
from tests.pallas_kernels.grouped_linear.test_mosaic_tpu import weight_of
from tests.pallas_kernels.strategies import SEEDS, examples
from tests.pallas_kernels.tpu_interpreter import INTERPRETER

EXPERTS, CHOICES, HIDDEN, INNER = 6, 2, 256, 128


def check(
    tokens: int,
    seed: int,
    kind: str = "float",
    dtype: str = "float32",
    interpret: Any = True,
    activations: str = "float",
) -> None:
    """A sparse MLP whose dead tokens are NaN."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(tokens, HIDDEN)), dtype)
    scores = rng.normal(size=(tokens, EXPERTS)).astype(np.float32)
    live = rng.random(tokens) < 0.8
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER if kind == "float" else HIDDEN)
    (up, wide_up), (down, wide_down) = (
        weight_of(kind, rng.normal(size=shape).astype(np.float32) / 16) for shape in shapes
    )
    if kind == "float":
        up, down = up.astype(dtype), down.astype(dtype)

    best = np.argsort(-scores, axis=1, kind="stable")[:, :CHOICES]
    parts = np.take_along_axis(np.exp(scores.astype(np.float64)), best, 1)
    parts /= parts.sum(1, keepdims=True)
    want = np.zeros((tokens, HIDDEN))
    for token in np.flatnonzero(live):
        for expert, part in zip(best[token], parts[token], strict=True):
            both = wide_up[expert].astype(np.float64) @ np.asarray(x[token], np.float64)
            inner = both[::2] / (1 + np.exp(-both[::2])) * both[1::2]
            want[token] += part * (wide_down[expert][:, : len(inner)].astype(np.float64) @ inner)

    kernel: dict[str, Any] = {"backend": "mosaic_tpu", "interpret": interpret}
    options = kernel | {"activations": activations}
    sizes = block_sizes("mosaic_tpu")
    assert sizes is not None
    weights, blocks = route(
        jnp.where(live[:, None], scores, jnp.nan),
        jnp.asarray(live),
        choices=CHOICES,
        normalized=True,
        sizes=sizes,
        **kernel,
    )
    poisoned = jnp.where(live[:, None], x, jnp.nan)
    inner = linear_in_blocks(poisoned, up, blocks, sources=CHOICES, gated=True, **options)
    if kind != "float":  # whole blocks of inputs
        inner = jnp.pad(inner, ((0, 0), (0, HIDDEN - INNER)))
    found = linear_in_blocks(inner, down, blocks, weights=weights, **options)
    assert found.shape == (tokens, HIDDEN) and found.dtype == jnp.float32
    atol = (2e-2 if "bfloat16" in dtype or activations == "int8" else 1e-5) * max(
        np.abs(want).max(), 1
    )
    np.testing.assert_allclose(np.asarray(found)[live], want[live], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("kind", "dtype", "activations"),
    [
        ("float", "float32", "float"),
        pytest.param("float", "bfloat16", "float", marks=pytest.mark.slow),
        pytest.param("int8", "bfloat16", "float", marks=pytest.mark.slow),
        pytest.param("int8", "float32", "int8", marks=pytest.mark.slow),
        pytest.param("fp8", "bfloat16", "float", marks=pytest.mark.slow),
    ],
)
def test_tokens_meet_their_experts(kind: str, dtype: str, activations: str) -> None:
    check(21, 0, kind, dtype, activations=activations)


@pytest.mark.slow
@examples(4)
@given(seed=SEEDS, tokens=st.sampled_from([1, 2, 17, 70]))
def test_any_number_of_tokens(seed: int, tokens: int) -> None:
    check(tokens, seed)


@pytest.mark.slow
def test_memory_that_nothing_has_written_is_not_read() -> None:
    check(9, 0, interpret=INTERPRETER)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_many_rows_are_gathered_and_added_by_xla(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rounded by it."""
    monkeypatch.setattr(mosaic_tpu, "HELD_BYTES", 0)
    check(21, 0, "float" if activations == "float" else "int8", activations=activations)


def test_gated_results_are_not_added() -> None:
    weights, blocks = route(
        jnp.zeros((4, 2)), jnp.ones(4, bool), choices=1, normalized=True, backend="xla"
    )
    rows, weight = jnp.zeros((blocks.rows.size, 128)), jnp.zeros((2, 256, 128))
    options: dict[str, Any] = {"weights": weights, "gated": True, "backend": "mosaic_tpu"}
    with pytest.raises(KernelError, match="gated"):
        jax.eval_shape(lambda x: linear_in_blocks(x, weight, blocks, **options), rows)

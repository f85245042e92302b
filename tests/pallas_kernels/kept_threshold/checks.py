"""Rows of weights, and their bounds against float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import kept_threshold

WITHIN = 1e-6  # of top_p: nearer to it the mass of float64 need not decide
KINDS = ("peaked", "normal", "flat", "even", "ties", "clusters", "crowded", "mostly_zero", "tail")


def row(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """float32[V], the largest 1."""
    weights = np.exp(rng.normal(0, 2.5, vocab))
    if kind == "peaked":
        weights = np.exp(rng.normal(0, 8.0, vocab))
    elif kind == "flat":
        weights = np.exp(rng.normal(0, 0.02, vocab))
    elif kind == "even":
        weights = np.ones(vocab)
    elif kind == "ties":
        weights = 2.0 ** -rng.integers(0, 6, vocab) / 3
    elif kind == "clusters":  # of neighbouring float32 numbers, far from each other
        weights = 10.0 ** -rng.integers(0, 8, vocab) * (1 + 1e-7 * rng.integers(0, 9, vocab))
    elif kind == "crowded":  # one likely token, and all others within 0.1 %
        weights = 1e-3 * (1 + 1e-3 * rng.random(vocab))
        weights[rng.integers(vocab)] = 1.0
    elif kind == "mostly_zero":
        weights *= rng.random(vocab) < 0.05
        weights[rng.integers(vocab)] = 1.0
    elif kind == "tail":
        weights = np.exp(rng.uniform(-79, 0, vocab))
    weights = (weights / weights.max()).astype(np.float32)
    return np.where(weights < np.exp(np.float32(-80)), np.float32(0), weights)


def bounds(weights: Any, top_k: Any, top_p: Any, min_p: Any, **options: Any) -> np.ndarray:
    """float32[R] of rows [R, V]; parameters by row or one for all."""
    rows = len(weights)
    operands = [
        jnp.broadcast_to(jnp.asarray(value, dtype), rows)
        for value, dtype in ((top_k, jnp.int32), (top_p, jnp.float32), (min_p, jnp.float32))
    ]
    return np.asarray(kept_threshold(jnp.asarray(weights), *operands, **options))


def check(weights: np.ndarray, bound: np.float32, top_k: int, top_p: float, min_p: float) -> None:
    """The tokens that a bound keeps of a row are those of float64 sums.

    Raises:
        AssertionError: they are not, although the mass at their border is not within WITHIN.
    """
    what = f"top_k={top_k} top_p={top_p} min_p={min_p}"
    vocab = len(weights)
    descending = np.sort(weights)[::-1]
    floor = np.float32(min_p)
    if 0 < top_k < vocab:
        floor = max(floor, descending[top_k - 1])
    left = np.where(weights >= floor, weights, 0).astype(np.float64)
    kept = (weights >= bound) & (weights > 0)
    share = np.float64(np.float32(top_p))
    if share >= 1.0:
        np.testing.assert_array_equal(kept, left > 0, err_msg=what)
        return
    assert kept.any() and not (kept & (left == 0)).any(), what
    least = weights[kept].min()
    total = left.sum()
    assert np.array_equal(kept, weights >= least), what
    assert left[kept].sum() >= (share - WITHIN) * total, what
    assert left[weights > least].sum() < (share + WITHIN) * total, what


def check_rows(weights: np.ndarray, top_k: Any, top_p: Any, min_p: Any, **options: Any) -> None:
    """`check` for every row; parameters by row."""
    found = bounds(weights, top_k, top_p, min_p, **options)
    for case in zip(weights, found, top_k, top_p, min_p, strict=True):
        check(*case)

"""A second, independent oracle: NumPy in float64, loops, no paging inside the mathematics."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np


def to_float64(stored: np.ndarray) -> np.ndarray:
    """Pool elements as float64; uint16 means bfloat16 bits."""
    if stored.dtype == np.uint16:
        stored = stored.view(ml_dtypes.bfloat16)
    return stored.astype(np.float64)


def attend_one(
    q: np.ndarray,  # [H, D]
    k: np.ndarray,  # [tokens, KVH, D]
    v: np.ndarray,  # [tokens, KVH, D]
    scale: float,
) -> np.ndarray:  # [H, D]
    group = q.shape[0] // k.shape[1]
    out = np.zeros(q.shape, np.float64)
    for head in range(q.shape[0]):
        scores = scale * (k[:, head // group] @ q[head])
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, head // group] / weights.sum()
    return out


def decode(q, kv_pages, page_table, kv_lens, *, scale, window=None, first_page=0) -> np.ndarray:
    """Float64 attention of each row over the tokens that it may see."""
    q = to_float64(np.asarray(q))
    pool = np.asarray(kv_pages)
    table, lengths = np.asarray(page_table), np.asarray(kv_lens)
    page_size = pool.shape[1]
    out = np.zeros(q.shape, np.float64)
    for row, length in enumerate(lengths):
        if length == 0:
            continue
        low = 0 if window is None else max(0, int(length) - window)
        tokens = np.arange(low, length)
        held = to_float64(pool[first_page + table[row, tokens // page_size], tokens % page_size])
        out[row] = attend_one(q[row], held[:, 0], held[:, 1], scale)
    return out


def prefill(q, kv_pages, page_table, lanes, *, scale, window=None, first_page=0) -> np.ndarray:
    """Float64 causal attention of each lane's rows; other rows are zero."""
    q = np.asarray(q)
    out = np.zeros(q.shape, np.float64)
    for lane, (start, length, context) in enumerate(zip(*(np.asarray(part) for part in lanes))):
        if length == 0:
            continue
        rows = slice(int(start), int(start + length))
        out[rows] = decode(
            q[rows],
            kv_pages,
            np.repeat(np.asarray(page_table)[lane : lane + 1], length, axis=0),
            context + 1 + np.arange(length),
            scale=scale,
            window=window,
            first_page=first_page,
        )
    return out


def relative_error(got, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude of the oracle; infinite where got has NaN."""
    difference = np.abs(np.asarray(got, np.float64) - want)
    if not np.isfinite(difference).all():
        return float("inf")
    return float(difference.max() / max(np.abs(want).max(), 1e-30))


# scores and sums are float32 everywhere; 16-bit pools round the softmax weights to the pool's type
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2, "uint16": 1e-2}
POOLS = tuple(jnp.dtype(name) for name in TOLERANCE)

"""A second, independent oracle: NumPy in float64, loops, no paging inside the mathematics."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np


def to_float64(stored: np.ndarray) -> np.ndarray:
    """Pool elements as float64; uint16 and uint8 mean bfloat16 and float8_e4m3fn bits."""
    if stored.dtype == np.uint16:
        stored = stored.view(ml_dtypes.bfloat16)
    if stored.dtype == np.uint8:
        stored = stored.view(ml_dtypes.float8_e4m3fn)
    return stored.astype(np.float64)


def scale_of(scale, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """float64 [tokens, KVH or 1, 1]: what the elements of tokens in those places are times."""
    if scale is None:
        return np.ones((1, 1, 1))
    scale = to_float64(np.asarray(scale))
    return scale.reshape(1, 1, 1) if scale.ndim == 0 else scale[pages, :, offsets][:, :, None]


def attend_one(
    q: np.ndarray,  # [H, D]
    k: np.ndarray,  # [tokens, KVH, D]
    v: np.ndarray,  # [tokens, KVH, D]
    scale: float,
    soft_cap: float | None,
    sinks: np.ndarray | None,  # [H]
) -> np.ndarray:  # [H, D]
    group = q.shape[0] // k.shape[1]
    out = np.zeros(q.shape, np.float64)
    for head in range(q.shape[0]):
        scores = scale * (k[:, head // group] @ q[head])
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head]))
        out[head] = weights @ v[:, head // group] / total
    return out


def decode(
    q,
    kv_pages,
    page_table,
    kv_lens,
    *,
    scale,
    query_lens=None,
    soft_cap=None,
    window=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
    first_page=0,
) -> np.ndarray:
    """Float64 attention of each query over the tokens that it may see; q [B, H, D] or [B, Q, H, D].

    Query i of n is token length - n + i of its row.
    """
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    shape = q.shape
    q = to_float64(np.asarray(q)).reshape(shape[0], -1, *shape[-2:])
    pool = np.asarray(kv_pages)
    table, lengths = np.asarray(page_table), np.asarray(kv_lens)
    counts = np.full(shape[0], q.shape[1]) if query_lens is None else np.asarray(query_lens)
    page_size = pool.shape[1]
    out = np.zeros(q.shape, np.float64)
    for row, query in np.ndindex(q.shape[:2]):
        position = int(lengths[row]) - int(counts[row]) + query
        if query >= counts[row] or position < 0:
            continue
        low = 0 if window is None else max(0, position + 1 - window)
        tokens = np.arange(low, position + 1)
        pages = first_page + table[row, tokens // page_size]
        held = to_float64(pool[pages, tokens % page_size])
        k_factor, v_factor = (scale_of(s, pages, tokens % page_size) for s in (k_scale, v_scale))
        k, v = held[:, 0] * k_factor, held[:, 1] * v_factor
        out[row, query] = attend_one(q[row, query], k, v, scale, soft_cap, sinks)
    return out.reshape(shape)


def prefill(q, kv_pages, page_table, lanes, **options) -> np.ndarray:
    """Float64 causal attention of each lane's rows; other rows are zero. Options as for decode."""
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
            **options,
        )
    return out


def relative_error(got, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude of the oracle; infinite where got has NaN."""
    difference = np.abs(np.asarray(got, np.float64) - want)
    if not np.isfinite(difference).all():
        return float("inf")
    return float(difference.max() / max(np.abs(want).max(), 1e-30))


def row_errors(got, want: np.ndarray) -> np.ndarray:
    """Largest difference of each row [rows, H, D] over the row's largest magnitude, as above."""
    difference = np.abs(np.asarray(got, np.float64) - want).max(axis=(1, 2))
    errors = difference / np.maximum(np.abs(want).max(axis=(1, 2)), 1e-30)
    return np.where(np.isfinite(errors), errors, np.inf)


# scores and sums are float32 everywhere; 16-bit pools round the softmax weights to the pool's type
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2, "uint16": 1e-2}
# 8-bit pages are exact in the 16-bit type of the query: what they stand for is what is compared
TOLERANCE |= {"int8": 1e-2, "float8_e4m3fn": 1e-2, "uint8": 1e-2}
POOLS = tuple(jnp.dtype(name) for name in TOLERANCE)

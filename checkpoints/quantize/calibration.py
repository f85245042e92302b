"""Static scales of activations, from the activations of a calibration text."""

from __future__ import annotations

import numpy as np

METHODS = ("minmax", "percentile", "mse")
INT8_MAX = 127
PERCENTILE = 99.99
_SHRINKS = np.linspace(1.0, 0.2, 41)
_MOST_NUMBERS = 1 << 20  # that the squared error is computed over


def activation_scale(x: np.ndarray, method: str) -> float:
    """The scale of 8-bit activations: one number for all tokens and inputs.

    "minmax" has room for the largest number, "percentile" for 99.99 % of them, and "mse" is the
    scale with the smallest squared error among those between 0.2 and 1 times that of "minmax".

    Args:
        x: float32 [tokens, inputs].
        method: one of `METHODS`.

    Raises:
        ValueError: another method, or numbers that are not finite.
    """
    if method not in METHODS:
        raise ValueError(f"calibration {method!r} is not one of {', '.join(METHODS)}")
    largest = float(np.abs(x).max())
    if not np.isfinite(largest):
        raise ValueError("activations are not finite")
    if not largest:
        return 1.0
    if method == "minmax":
        return largest / INT8_MAX
    if method == "percentile":
        return max(float(np.percentile(np.abs(x), PERCENTILE)), largest * 1e-6) / INT8_MAX
    flat = x.reshape(-1)[:: max(1, x.size // _MOST_NUMBERS)]
    scales = [largest * float(shrink) / INT8_MAX for shrink in _SHRINKS]
    return min(scales, key=lambda scale: _squared_error(flat, scale))


def _squared_error(x: np.ndarray, scale: float) -> float:
    rounded = np.rint(x / scale).clip(-INT8_MAX - 1, INT8_MAX) * scale
    return float(np.square(x - rounded, dtype=np.float64).sum())

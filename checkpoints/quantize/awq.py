"""AWQ: inputs with large activations are scaled up before rounding (Lin et al. 2023).

The factors are searched on a grid of powers of the mean activation, and undone in what computes
the inputs, so that nothing is added at run time. Then the range of each group is clipped where that
makes the output more exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from checkpoints.quantize.rounding import round_with_zeros

_POWERS = np.linspace(0.0, 1.0, 21)[:-1]
_SHRINKS = np.linspace(1.0, 0.55, 10)
_CLIP_ROWS = 128  # of activations
_CLIP_NUMBERS = 1 << 22  # of outputs that are compared at once


def best_factors(
    weights: Sequence[np.ndarray], x: np.ndarray, group: int, means: np.ndarray
) -> np.ndarray:
    """Factors of the inputs of matrices that see the same activations.

    Args:
        weights: float32 [out, in] each.
        x: float32 [tokens, in].
        group: inputs that share a scale.
        means: float32[in] mean sizes of activations; the best of their powers is taken.

    Returns:
        float32[in], by which weights are to be multiplied and activations divided.
    """
    means = np.maximum(means.astype(np.float32), 1e-4)
    wanted = [x @ weight.T for weight in weights]
    best, least = np.ones_like(means), np.inf
    for power in _POWERS:
        factors = means ** np.float32(power)
        factors /= np.sqrt(factors.max() * factors.min())
        error = 0.0
        for weight, right in zip(weights, wanted, strict=True):
            rounded = round_with_zeros(weight * factors, group, np.dtype(np.float32))
            got = (x / factors) @ rounded.dequantized().T
            error += float(np.square(got - right, dtype=np.float64).sum())
        if error < least:
            best, least = factors, error
    return best


def clipped(weight: np.ndarray, x: np.ndarray, group: int) -> np.ndarray:
    """The matrix with each group cut off where its rounded output errs least.

    Args:
        weight: float32 [out, in].
        x: float32 [tokens, in].
        group: inputs that share a scale.
    """
    outputs, inputs = weight.shape
    groups = inputs // group
    rows = x[:: max(1, len(x) // _CLIP_ROWS)][:_CLIP_ROWS].reshape(-1, groups, group)
    by_group = np.ascontiguousarray(rows.transpose(1, 0, 2))  # [G, T, I]
    result = np.empty_like(weight)
    step = max(1, _CLIP_NUMBERS // (len(rows) * groups))
    for start in range(0, outputs, step):
        part = weight[start : start + step].reshape(-1, groups, group)
        bounds = np.abs(part).max(axis=-1, keepdims=True)
        wanted = by_group @ part.transpose(1, 2, 0)  # [G, T, O]
        least = np.full(part.shape[:2], np.inf, np.float32)
        best = bounds
        for shrink in _SHRINKS:
            bound = bounds * np.float32(shrink)
            cut = part.clip(-bound, bound)
            rounded = round_with_zeros(cut.reshape(-1, inputs), group, np.dtype(np.float32))
            got = rounded.dequantized().reshape(part.shape)
            found = by_group @ got.transpose(1, 2, 0)
            error = np.square(found - wanted).mean(axis=1).T  # [O, G]
            better = error < least
            least = np.where(better, error, least)
            best = np.where(better[..., None], bound, best)
        result[start : start + step] = part.clip(-best, best).reshape(-1, inputs)
    return result

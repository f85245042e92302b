"""GPTQ: each input's rounding error is made up for by the inputs after it (Frantar et al. 2022).

Inputs are rounded in the order of their second derivatives, the largest first ("act-order"), and
the groups that share a scale are of inputs in that order.
"""

from __future__ import annotations

import numpy as np

from checkpoints.quantize.rounding import RoundedMatrix, stored_scales

DAMPING = 0.01  # of the mean of the Hessian's diagonal
_BLOCK = 128  # inputs in a block: their errors are handed on one by one
ZERO = 8


def hessian(x: np.ndarray) -> np.ndarray:
    """Second derivatives of the squared error of x @ weight.T, float32 [in, in]; x [tokens, in]."""
    wide = x.astype(np.float32)
    return (2.0 / len(wide)) * (wide.T @ wide)


def gptq(
    weight: np.ndarray,
    second: np.ndarray,
    group: int | None,
    scale_dtype: np.dtype,
    act_order: bool = True,
) -> RoundedMatrix:
    """4-bit unsigned integers with the zero 8.

    Args:
        weight: float32 [out, in].
        second: float32 [in, in] of `hessian`.
        group: inputs that share a scale; None: all of a row.
        scale_dtype: that scales are stored in.
        act_order: whether inputs are rounded in the order of the Hessian's diagonal.

    Raises:
        ValueError: a Hessian that is not finite.
    """
    if not np.isfinite(second).all():
        raise ValueError("activations are not finite")
    outputs, inputs = weight.shape
    size = group or inputs
    diagonal = np.diagonal(second)
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(inputs)
    work = np.ascontiguousarray(weight.T[order], np.float32)  # [in, out]: inputs are rows here
    factor = _inverse_factor(second[np.ix_(order, order)])
    elements = np.empty((inputs, outputs), np.uint8)
    scales = np.ones((inputs // size, outputs), np.float32)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors = np.empty((stop - start, outputs), np.float32)
        for row in range(start, stop):
            if row % size == 0:
                largest = np.abs(work[row : min(stop, row + size)]).max(axis=0)
                beyond = slice(stop, row + size)
                if row + size > stop:
                    # errors of this block have not been handed on beyond it yet
                    late = factor[start:row, beyond].T @ errors[: row - start]
                    largest = np.maximum(largest, np.abs(work[beyond] - late).max(axis=0))
                scales[row // size] = stored_scales(largest * 2 / 15, scale_dtype)
            scale = scales[row // size]
            now = work[row].copy()
            element = (np.rint(now / scale) + ZERO).clip(0, 15)
            elements[row] = element
            error = (now - (element - ZERO) * scale) / factor[row, row]
            work[row:stop] -= factor[row, row:stop, None] * error
            errors[row - start] = error
        work[stop:] -= factor[start:stop, stop:].T @ errors
    natural = np.empty((outputs, inputs), np.uint8)
    natural[:, order] = elements.T
    by_output = np.ascontiguousarray(scales.T)
    zeros = np.full(by_output.shape, ZERO, np.uint8)
    return RoundedMatrix(natural, by_output, zeros, order if act_order else None)


def _inverse_factor(second: np.ndarray) -> np.ndarray:
    """The upper triangular U with U.T @ U = inverse of the damped matrix."""
    wide = second.astype(np.float64)
    diagonal = np.einsum("ii->i", wide)
    diagonal[diagonal == 0] = 1.0  # inputs that are never used
    diagonal += DAMPING * diagonal.mean()
    lower = np.linalg.cholesky(np.linalg.inv(wide))
    return np.ascontiguousarray(lower.T).astype(np.float32)

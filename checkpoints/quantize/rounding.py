"""Rounding to the nearest number of a grid, a scale for each row or group of a row."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0


class RoundedMatrix(NamedTuple):
    """A matrix [out, in] of few bits: value = (element - zero) * scale.

    Attributes:
        elements: int8, uint8 (with zeros) or e4m3 [out, in].
        scales: float32[out, groups].
        zeros: uint8[out, groups]; None: 0.
        order: int64[in], the inputs in the order of the groups, where it is not theirs.
    """

    elements: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    order: np.ndarray | None = None

    def dequantized(self) -> np.ndarray:
        """float32 [out, in]."""
        outputs, inputs = self.elements.shape
        groups = self.scales.shape[1]
        elements = self.elements if self.order is None else self.elements[:, self.order]
        wide: np.ndarray = elements.astype(np.float32).reshape(outputs, groups, -1)
        if self.zeros is not None:
            wide -= self.zeros[..., None]
        wide *= self.scales[..., None]
        rows = wide.reshape(outputs, inputs)
        if self.order is None:
            return rows
        natural = np.empty_like(rows)
        natural[:, self.order] = rows
        return natural


def round_integers(
    weight: np.ndarray, bits: int, group: int | None, scale_dtype: np.dtype
) -> RoundedMatrix:
    """Symmetric integers: the largest number of a row or group is 2^(bits - 1) - 1.

    Args:
        weight: float32 [out, in].
        bits: 4 or 8.
        group: inputs that share a scale; None: all of a row.
        scale_dtype: that scales are stored in; they are rounded to it first.
    """
    outputs, inputs = weight.shape
    most = 2 ** (bits - 1) - 1
    grouped = weight.reshape(outputs, -1, group or inputs)
    scales = stored_scales(np.abs(grouped).max(axis=-1) / most, scale_dtype)
    elements = np.rint(grouped / scales[..., None]).clip(-most - 1, most).astype(np.int8)
    return RoundedMatrix(elements.reshape(outputs, inputs), scales)


def round_fp8(weight: np.ndarray, scale_dtype: np.dtype) -> RoundedMatrix:
    """8-bit floats e4m3, the largest number of a row is 448; weight float32 [out, in]."""
    scales = stored_scales(np.abs(weight).max(axis=-1, keepdims=True) / FP8_MAX, scale_dtype)
    return RoundedMatrix((weight / scales).clip(-FP8_MAX, FP8_MAX).astype(FP8), scales)


def round_with_zeros(weight: np.ndarray, group: int | None, scale_dtype: np.dtype) -> RoundedMatrix:
    """4-bit integers with a zero a group: smallest and largest number are the ends of the grid.

    Args:
        weight: float32 [out, in].
        group, scale_dtype: as of `round_integers`.
    """
    (outputs, inputs), most = weight.shape, 2**4 - 1
    grouped = weight.reshape(outputs, -1, group or inputs)
    low, high = np.minimum(grouped.min(axis=-1), 0), np.maximum(grouped.max(axis=-1), 0)
    scales = stored_scales((high - low) / most, scale_dtype)
    zeros = np.rint(-low / scales).clip(0, most)
    elements = (np.rint(grouped / scales[..., None]) + zeros[..., None]).clip(0, most)
    return RoundedMatrix(
        elements.astype(np.uint8).reshape(outputs, inputs), scales, zeros.astype(np.uint8)
    )


def stored_scales(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 of scales as they will be read back; 1 where all numbers are 0."""
    kept = scales.astype(np.float32).astype(dtype).astype(np.float32)
    return np.where(kept > 0, kept, np.float32(1))

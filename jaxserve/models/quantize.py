"""Weights in few bits on the host: a checkpoint's as they are, or rounded from floats, by rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from checkpoints import CheckpointError, aligned_empty
from checkpoints.quantized import ELEMENTS, INT4_ZERO, Checkpoint, Encoding, Part
from jaxserve.models.quant_array import QuantArray
from jaxserve.models.sources import Source, Stack
from jaxserve.models.weight_plan import same_elements
from pallas_kernels.native.weights import LANES
from pallas_kernels.quantized_matmul.formats import FP8_MAX, INT8_MAX

QUANTIZED_BLOCK_BYTES = 1 << 20  # of float32
INT4_MAX = 7  # symmetric: -8 is not used


class Elements(NamedTuple):
    """Rows of a quantised weight: elements [rows, in], scales and zeros [rows, groups]."""

    elements: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


def quantized_rows(wide: np.ndarray, stored: Encoding) -> Elements:
    """Rounds float32 [rows, in], which it may overwrite, to the nearest elements.

    The numbers are those of `pallas_kernels.quantize_int8`, `quantize_int4` and `quantize_fp8`.
    """
    largest_element = {"int8": INT8_MAX, "int4": INT4_MAX, "fp8": FP8_MAX}[stored.kind]
    rows, inputs = wide.shape
    grouped = wide.reshape(rows, -1, stored.group or inputs)
    largest = np.maximum(grouped.max(axis=2), -grouped.min(axis=2))
    # a number that is not finite makes a scale that is none
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(largest_element))
    grouped /= scales[..., None]
    if stored.kind == "fp8":
        np.clip(grouped, -FP8_MAX, FP8_MAX, out=grouped)
        return Elements(grouped.astype(ELEMENTS["fp8"]).reshape(rows, inputs), scales)
    np.rint(grouped, out=grouped)
    if stored.kind == "int4":
        grouped += INT4_ZERO
    return Elements(grouped.astype(ELEMENTS[stored.kind]).reshape(rows, inputs), scales)


def read_quantized(
    source: Source | Stack, checkpoint: Checkpoint, wanted: QuantArray
) -> QuantArray:
    """A weight as `wanted` keeps it, in NumPy arrays.

    Where the checkpoint's rows lie one after the other, a few are read at a time, so that no weight
    is whole in a wider type. Of rows that devices divide, those of this process alone are read.

    Raises:
        CheckpointError: a tensor that cannot be read, or scales or floats that are not finite.
    """
    shape, format = wanted.shape, wanted.format
    matrices = [checkpoint.matrices.get(name) for name in source.names]
    first = matrices[0]
    kept_as_stored = first is not None and same_elements(format.stored, first.stored)
    groups = format.stored.groups(shape[-1])
    values = aligned_empty(wanted.values.shape, format.dtype)
    by_block = values.reshape(-1, values.shape[-1])
    scales = np.empty((*shape[:-1], groups), format.scale_dtype)
    zeros = None if format.zero_dtype is None else np.empty(scales.shape, format.zero_dtype)

    def part(name: str, columns: int, dtype: Any, rows: slice) -> np.ndarray:
        whole = (*shape[:-1], columns)
        index = (rows, *(slice(None),) * (len(shape) - 1))
        return source.read(Part(checkpoint.matrices, name), whole, index, dtype, True)

    def floats(rows: slice) -> np.ndarray:
        index = (rows, *(slice(None),) * (len(shape) - 1))
        return source.read(checkpoint, shape, index, np.dtype(np.float32), True)

    outputs = math.prod(shape[1:-1])  # of an index of the first axis
    # gate and up are read in pairs, and blocks of outputs are whole
    unit = math.lcm(2, LANES // math.gcd(LANES, outputs))
    step = max(1, QUANTIZED_BLOCK_BYTES // (4 * outputs * shape[-1]) // unit) * unit
    begin, end = _own_rows(wanted)
    if not all(matrix is None or matrix.by_rows for matrix in matrices):
        begin, end, step = 0, shape[0], shape[0]
    for start in range(begin - begin % unit, end, step):
        rows = slice(start, min(start + step, -(-end // unit) * unit, shape[0]))
        if kept_as_stored:
            assert first is not None
            kind, zero_kind = first.stored.kind, first.stored.zeros
            found = Elements(
                _flat(part("elements", shape[-1], ELEMENTS[kind], rows)),
                _flat(part("scales", groups, np.dtype(np.float32), rows)),
                None
                if zeros is None
                else _flat(part("zeros", groups, ZERO_DTYPES[kind, zero_kind], rows)),
            )
        else:
            found = quantized_rows(_flat(floats(rows)), format.stored)
            if not np.isfinite(found.scales).all():
                problem = "its numbers are not all finite, so they cannot be rounded"
                raise CheckpointError(checkpoint.path, problem, ", ".join(source.names[:3]))
        kept, kept_zeros = format.as_kept(*found)
        if format.in_blocks:
            block = start * outputs // LANES
            by_block[block : block + len(kept)] = kept
        else:
            values[rows] = kept.reshape(values[rows].shape)
        scales[rows] = found.scales.reshape(scales[rows].shape)
        if zeros is not None:
            assert kept_zeros is not None
            zeros[rows] = kept_zeros.reshape(zeros[rows].shape)
    order = first.order() if first is not None and wanted.order is not None else None
    static = None
    if wanted.input_scale is not None:
        # one of all the tensors that see the same activations: it has room for the largest
        found_scales = [matrix.input_scale() for matrix in matrices if matrix is not None]
        static = np.array([max(scale for scale in found_scales if scale is not None)], np.float32)
    return wanted.with_arrays(values, scales, zeros, order, static)


def _own_rows(wanted: QuantArray) -> tuple[int, int]:
    """Begin and end of the indices of the first axis that devices of this process have."""
    axis, size = 0 if wanted.format.by_output else 1, wanted.shape[0]
    sharding = wanted.scale.sharding
    every = sharding.addressable_devices_indices_map(wanted.scale.shape).values()
    own = [index[axis].indices(size) for index in every if index is not None]
    return min(begin for begin, *_ in own), max(end for _, end, _ in own)


ZERO_DTYPES = {
    ("int4", "integer"): np.dtype(np.uint8),
    ("int8", "integer"): np.dtype(np.int16),
    ("int4", "offset"): np.dtype(np.float32),
    ("int8", "offset"): np.dtype(np.float32),
}


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])

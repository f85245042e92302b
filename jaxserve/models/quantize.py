"""Weights in few bits on the host: a checkpoint's as they are, or rounded from floats, by rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
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
    is whole in a wider type. Of what devices divide, the part of this process's devices alone is
    read, except of rows that are rounded here with one scale: it takes all inputs.

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

    own_rows, *own_outputs, own_inputs = _own_part(wanted)
    if not kept_as_stored and format.stored.group is None:
        own_inputs = slice(0, shape[-1])
    begin, end, inputs = own_rows.start, own_rows.stop, own_inputs.stop - own_inputs.start
    group, kept_columns = format.stored.group or shape[-1], values.shape[-1]
    own_groups = slice(own_inputs.start // group, -(-own_inputs.stop // group))
    columns = slice(
        own_inputs.start * kept_columns // shape[-1], own_inputs.stop * kept_columns // shape[-1]
    )
    own_format = replace(format, parts=max(1, format.parts * inputs // shape[-1]))

    def part(name: str, rows: slice, dtype: Any) -> np.ndarray:
        by_group = name != "elements"
        whole = (*shape[:-1], groups if by_group else shape[-1])
        index = (rows, *own_outputs, own_groups if by_group else own_inputs)
        return _flat(source.read(Part(checkpoint.matrices, name), whole, index, dtype, True))

    def floats(rows: slice) -> np.ndarray:
        index = (rows, *own_outputs, own_inputs)
        return _flat(source.read(checkpoint, shape, index, np.dtype(np.float32), True))

    every = math.prod(shape[1:-1])  # outputs of an index of the first axis
    outputs = math.prod(one.stop - one.start for one in own_outputs)  # that are read of them
    # gate and up are read in pairs, and blocks of outputs are whole
    unit = math.lcm(2, LANES // math.gcd(LANES, every))
    step = max(1, QUANTIZED_BLOCK_BYTES // (4 * outputs * inputs) // unit) * unit
    if not all(matrix is None or matrix.by_rows for matrix in matrices):
        step = shape[0]
    if outputs < every:
        unit = step = 1  # of experts, whose own outputs are not side by side
    for start in range(begin - begin % unit, end, step):
        rows = slice(start, min(start + step, -(-end // unit) * unit, shape[0]))
        if kept_as_stored:
            assert first is not None
            kind, zero_kind = first.stored.kind, first.stored.zeros
            found = Elements(
                part("elements", rows, ELEMENTS[kind]),
                part("scales", rows, np.dtype(np.float32)),
                None if zeros is None else part("zeros", rows, ZERO_DTYPES[kind, zero_kind]),
            )
        else:
            found = quantized_rows(floats(rows), format.stored)
            if not np.isfinite(found.scales).all():
                problem = "its numbers are not all finite, so they cannot be rounded"
                raise CheckpointError(checkpoint.path, problem, ", ".join(source.names[:3]))
        kept, kept_zeros = own_format.as_kept(*found)
        if format.in_blocks:
            skipped = own_outputs[0].start * every // shape[1] if own_outputs else 0
            block = (start * every + skipped) // LANES
            by_block[block : block + len(kept), columns] = kept
        else:
            place = (rows, *own_outputs, columns)
            values[place] = kept.reshape(values[place].shape)
        place = (rows, *own_outputs, own_groups)
        scales[place] = found.scales.reshape(scales[place].shape)
        if zeros is not None:
            assert kept_zeros is not None
            zeros[place] = kept_zeros.reshape(zeros[place].shape)
    order = first.order() if first is not None and wanted.order is not None else None
    static = None
    if wanted.input_scale is not None:
        # one of all the tensors that see the same activations: it has room for the largest
        found_scales = [matrix.input_scale() for matrix in matrices if matrix is not None]
        static = np.array([max(scale for scale in found_scales if scale is not None)], np.float32)
    return wanted.with_arrays(values, scales, zeros, order, static)


def _own_part(wanted: QuantArray) -> list[slice]:
    """What devices of this process have of each axis of [*out, in], in one piece."""

    def own(array: jax.Array, axis: int) -> tuple[int, int]:
        every = array.sharding.addressable_devices_indices_map(array.shape).values()
        found = [index[axis].indices(array.shape[axis]) for index in every if index is not None]
        return min(begin for begin, *_ in found), max(end for _, end, _ in found)

    by_block = wanted.format.in_blocks
    held, first = (wanted.scale, 1) if by_block else (wanted.values, 0)
    outputs = [own(held, first + axis) for axis in range(len(wanted.shape) - 1)]
    inputs, kept = wanted.shape[-1], wanted.values.shape[-1]
    begin, end = own(wanted.values, wanted.values.ndim - 1)
    return [slice(*one) for one in (*outputs, (begin * inputs // kept, end * inputs // kept))]


ZERO_DTYPES = {
    ("int4", "integer"): np.dtype(np.uint8),
    ("int8", "integer"): np.dtype(np.int16),
    ("int4", "offset"): np.dtype(np.float32),
    ("int8", "offset"): np.dtype(np.float32),
}


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])

"""A checkpoint's quantised matrix, whatever its file format: elements, scales, zeros."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
ELEMENTS = {"int4": np.dtype(np.uint8), "int8": np.dtype(np.int8), "fp8": FP8}
ALL = slice(None)
INT4_ZERO = 8  # the element of "int4" that stands for zero where there are no zeros


@dataclass(frozen=True, slots=True)
class Encoding:
    """The meaning of the elements of a matrix [out, in].

    A value is (element - zero) * scale, or element * scale - offset.

    Attributes:
        kind: "int4" (elements 0..15, without zeros less 8), "int8" (-128..127) or "fp8" (e4m3).
        group: neighbouring inputs that share a scale; None: all of a row.
        zeros: "none", "integer" (a zero a group, uint8 for int4 and int16 for int8) or "offset"
            (float32 a group).
        activations: what the checkpoint was made for: "float", or rounded to "int8" or "fp8".
        ordered: whether the groups are of inputs in another order than the matrix's.
        static: whether activations are rounded with one scale, which the checkpoint has.
        scales: type of the scales.
    """

    kind: str
    group: int | None = None
    zeros: str = "none"
    activations: str = "float"
    ordered: bool = False
    static: bool = False
    scales: str = "float32"

    def groups(self, inputs: int) -> int:
        """Scales of a row."""
        return 1 if self.group is None else -(-inputs // self.group)

    def __str__(self) -> str:
        scale = "a row" if self.group is None else f"{self.group} inputs"
        return f"{self.kind} with a scale for {scale}"


class Matrix(Protocol):
    """A quantised matrix of a checkpoint, read some rows at a time.

    Attributes:
        shape: [out, in].
        stored: what its elements are.
        by_rows: whether its rows lie one after the other, so that some can be read alone.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def by_rows(self) -> bool: ...

    @property
    def stored(self) -> Encoding: ...

    def elements(self, rows: slice, columns: slice = ALL) -> np.ndarray:
        """[rows, columns] in the type that `ELEMENTS` names; column j is of input order()[j]."""

    def scales(self, rows: slice) -> np.ndarray:
        """float32 [rows, groups]."""

    def zeros(self, rows: slice) -> np.ndarray:
        """[rows, groups] of the type that `Encoding.zeros` says; not called for "none"."""

    def order(self) -> np.ndarray | None:
        """int32 [in] where `stored.ordered`, else None."""

    def input_scale(self) -> float | None:
        """Of the activations where `stored.static`, else None."""


def spread(by_group: np.ndarray, group: int | None, inputs: int) -> np.ndarray:
    """[rows, groups] -> one a row and input, or [rows, 1] for a group of all."""
    if group is None:
        return by_group
    return np.repeat(by_group, group, axis=1)[:, :inputs]


def dequantized(matrix: Matrix, rows: slice) -> np.ndarray:
    """float32 [rows, in] of a quantised matrix."""
    stored, inputs = matrix.stored, matrix.shape[1]
    wide = matrix.elements(rows).astype(np.float32)
    if stored.zeros == "integer":
        wide -= spread(matrix.zeros(rows).astype(np.float32), stored.group, inputs)
    elif stored.kind == "int4" and stored.zeros == "none":
        wide -= INT4_ZERO
    wide *= spread(matrix.scales(rows), stored.group, inputs)
    if stored.zeros == "offset":
        wide -= spread(matrix.zeros(rows), stored.group, inputs)
    order = matrix.order()
    if order is not None:
        unordered = np.empty_like(wide)
        unordered[:, order] = wide
        return unordered
    return wide


def unpacked(words: np.ndarray, bits: int, order: Iterable[int] | None = None) -> np.ndarray:
    """int32 words [R, C] -> uint8 [R, C * 32 / bits]: field i of a word is column order[i]."""
    count = 32 // bits
    unsigned, mask = words.view(np.uint32), np.uint32((1 << bits) - 1)
    out = np.empty((*words.shape, count), np.uint8)
    for place, column in enumerate(order or range(count)):
        out[..., column] = (unsigned >> np.uint32(bits * place)) & mask
    return out.reshape(len(words), -1)


def check_finite(path: Path, name: str, scales: np.ndarray) -> np.ndarray:
    """Scales as they are.

    Raises:
        CheckpointError: one is infinite or no number.
    """
    bad = int(np.count_nonzero(~np.isfinite(scales)))
    if bad:
        raise CheckpointError(path, f"{bad} of {scales.size} scales are not finite numbers", name)
    return scales


def full_rows(rows: slice, count: int) -> tuple[int, int]:
    """The first row of a slice of `count` and the last one, exclusive."""
    start, stop, _ = rows.indices(count)
    return start, max(start, stop)


def words_of(fields: slice, count: int, per_word: int) -> tuple[slice, slice]:
    """The words that have a slice of `count` fields, and the fields' places within these words."""
    start, stop = full_rows(fields, count)
    first = start // per_word
    skip = first * per_word
    return slice(first, -(-stop // per_word)), slice(start - skip, stop - skip)

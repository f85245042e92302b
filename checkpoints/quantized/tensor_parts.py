"""The tensors that a model asks a checkpoint for, and parts of quantised ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from checkpoints.quantized.quantized_matrix import ALL, Matrix, dequantized, full_rows

BLOCK_NUMBERS = 1 << 20  # that are dequantised at a time


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """All that is known of a tensor that is made of others."""

    shape: tuple[int, ...]


class TensorReader(Protocol):
    """The source of a parameter's numbers."""

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads the part of a tensor that one slice each of its first axes selects.

        An index of the first axis of `out` may hold several rows.
        """


class Checkpoint(TensorReader, Protocol):
    """The tensors of a checkpoint.

    Attributes:
        path: folder or file, for errors.
        format: name of what quantised it; empty: nothing did.
        tensors: every tensor that a model can ask for, by its name in Hugging Face's checkpoints.
        matrices: those that are quantised.
        zero_biases: biases of quantised layers that are 0: a model may have no place for them.
    """

    path: Path
    format: str
    zero_biases: frozenset[str]

    @property
    def tensors(self) -> Mapping[str, HasShape]: ...

    @property
    def matrices(self) -> Mapping[str, Matrix]: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One part of quantised matrices, as a reader of tensors.

    Attributes:
        matrices: by name.
        part: "elements", "scales", "zeros", or "values", which are the dequantised numbers.
    """

    matrices: Mapping[str, Matrix]
    part: str

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads rows, and of them the columns that are asked for."""
        matrix = self.matrices[name]
        start, stop = full_rows(index[0] if index else slice(None), matrix.shape[0])
        if not len(out):
            return
        per_index = (stop - start) // len(out)
        step = max(1, BLOCK_NUMBERS // (matrix.shape[1] * per_index))
        if not matrix.by_rows:
            step = len(out)
        for at in range(0, len(out), step):
            place = out[at : at + step]
            first = start + at * per_index
            rows = slice(first, first + len(place) * per_index)
            columns = index[1] if len(index) > 1 else ALL
            place[...] = self._read(matrix, rows, columns).reshape(place.shape)

    def _read(self, matrix: Matrix, rows: slice, columns: slice) -> np.ndarray:
        if self.part == "elements":
            return matrix.elements(rows, columns)
        if self.part == "values":
            return dequantized(matrix, rows)[:, columns]
        found: np.ndarray = getattr(matrix, self.part)(rows)[:, columns]
        return found

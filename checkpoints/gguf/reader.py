"""The tensors of a GGUF file, by Hugging Face's names and in its order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoints.close import Closeable
from checkpoints.errors import CheckpointError
from checkpoints.gguf.blocks import BlockType, Read
from checkpoints.gguf.config import hf_architecture
from checkpoints.gguf.file import GGUFFile
from checkpoints.gguf.names import (
    ROPE_FREQUENCIES,
    expert_names,
    hf_name,
    interleaved_rows,
    row_order,
)
from checkpoints.quantized.quantized_matrix import ALL, Encoding, Matrix, check_finite, full_rows
from checkpoints.quantized.tensor_parts import HasShape, Part, Shape

BLOCK_NUMBERS = 1 << 20  # that are unpacked at a time


@dataclass(frozen=True, slots=True)
class GGUFMatrix:
    """A matrix in blocks.

    Attributes:
        file: that it is in.
        name: GGUF's, of the tensor.
        shape: [out, in].
        stored: what its elements are.
        row_order: the file's rows in the matrix's order; None: as they are.
        first: row of the tensor at which it begins.
    """

    file: GGUFFile
    name: str
    shape: tuple[int, int]
    stored: Encoding
    row_order: np.ndarray | None
    first: int = 0

    @property
    def by_rows(self) -> bool:
        return True

    def elements(self, rows: slice, columns: slice = ALL) -> np.ndarray:
        return self._read(rows, self._type.read_elements)[:, columns]

    def scales(self, rows: slice) -> np.ndarray:
        return check_finite(self.file.path, self.name, self._read(rows, self._type.read_scales))

    def zeros(self, rows: slice) -> np.ndarray:
        return check_finite(self.file.path, self.name, self._read(rows, self._type.read_offsets))

    def order(self) -> None:
        return None

    def input_scale(self) -> None:
        return None

    @property
    def _type(self) -> BlockType:
        return self.file.tensors[self.name].type

    def _read(self, rows: slice, read: Read | None) -> np.ndarray:
        assert read is not None
        start, stop = full_rows(rows, self.shape[0])
        raw = rows_of(self.file, self.name, self.first + start, self.first + stop, self.row_order)
        return read(raw.reshape(stop - start, -1, self._type.bytes)).reshape(stop - start, -1)


def rows_of(
    file: GGUFFile, name: str, start: int, stop: int, order: np.ndarray | None
) -> np.ndarray:
    """The bytes of rows of a tensor, which lie in the order `order` in the file."""
    if order is None:
        return file.rows(name, start, stop)
    if start == stop:
        return file.rows(name, start, stop)
    wanted = order[start:stop]
    first = int(wanted.min())
    return file.rows(name, first, int(wanted.max()) + 1)[wanted - first]


class GGUFReader(Closeable):
    """A GGUF file as a checkpoint.

    Attributes:
        path: path of the file.
        format: "gguf".
        matrices: the quantised tensors.
        tensors: all tensors, by Hugging Face's names.
        file: the container: metadata and bytes.
    """

    format = "gguf"
    zero_biases: frozenset[str] = frozenset()

    def __init__(self, path: str | Path):
        """Reads the header.

        Raises:
            CheckpointError: as `GGUFFile`, or a tensor that is no matrix and is quantised.
        """
        self.path = Path(path)
        self.file = GGUFFile(path)
        try:
            self._places = self._named()
            self.matrices: dict[str, Matrix] = {}
            self.tensors: Mapping[str, HasShape] = {
                name: Shape(place.shape) for name, place in self._places.items()
            }
            for name, place in self._places.items():
                type = self.file.tensors[place.name].type
                if type.stored is None:
                    continue
                if len(place.shape) != 2:
                    problem = f"{type.name} of shape {list(place.shape)}, only matrices are read"
                    raise CheckpointError(self.path, problem, place.name)
                shape = (place.shape[0], place.shape[1])
                self.matrices[name] = GGUFMatrix(
                    self.file, place.name, shape, type.stored, place.row_order, place.first
                )
        except BaseException:
            self.file.close()
            raise

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads the part of a tensor that one slice each of its first axes selects, as floats.

        Raises:
            CheckpointError: the file ends early, or scales are not finite.
        """
        if name in self.matrices:
            Part(self.matrices, "values").read_into(name, index, out)
            return
        tensor = self._places.get(name)
        if tensor is None:
            raise CheckpointError(self.path, "there is no such tensor", name)
        own, dtype = tensor.name, self.file.tensors[tensor.name].type.dtype
        assert dtype is not None
        rows = index[0] if index else slice(None)
        if len(tensor.shape) == 1:
            whole = rows_of(self.file, own, 0, 1, None).reshape(-1).view(dtype)
            out[...] = whole[rows].reshape(out.shape)
            return
        start, stop = full_rows(rows, tensor.shape[0])
        per_index = max(1, (stop - start) // max(len(out), 1))
        step = max(1, BLOCK_NUMBERS // (tensor.shape[1] * per_index))
        for at in range(0, len(out), step):
            place = out[at : at + step]
            first = tensor.first + start + at * per_index
            raw = rows_of(self.file, own, first, first + len(place) * per_index, tensor.row_order)
            numbers = np.ascontiguousarray(raw).view(dtype)
            place[...] = (numbers[:, index[1]] if len(index) > 1 else numbers).reshape(place.shape)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def _named(self) -> dict[str, _Place]:
        metadata = self.file.metadata
        architecture = str(metadata.get("general.architecture"))
        heads = metadata.get(f"{architecture}.attention.head_count", 1)
        kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
        count = metadata.get(f"{architecture}.expert_count", 0)
        places: dict[str, _Place] = {}
        for own, info in self.file.tensors.items():
            if own == ROPE_FREQUENCIES:
                continue
            parts = expert_names(own, str(hf_architecture(metadata)), count)
            if parts is not None:
                places |= self._parts(own, parts)
                continue
            permuted, order = interleaved_rows(own, architecture, heads, kv_heads), None
            if permuted is not None and len(info.shape) == 2:
                if type(permuted) is not int or permuted < 1 or info.shape[0] % (2 * permuted):
                    raise CheckpointError(self.path, f"{permuted!r} heads in {info.shape}", own)
                order = row_order(info.shape[0], permuted)
            places[hf_name(own)] = _Place(own, info.shape, order)
        return places

    def _parts(self, own: str, names: list[str]) -> dict[str, _Place]:
        """The matrices of a tensor of a sparse layer: one an expert, or the router's."""
        shape = self.file.tensors[own].shape
        matrix = shape[-2:]
        if len(names) == 1 and len(shape) == 2:
            return {names[0]: _Place(own, matrix, None)}
        if len(shape) != 3 or shape[0] != len(names):
            problem = f"shape {list(shape)} for {len(names)} experts"
            raise CheckpointError(self.path, problem, own)
        return {
            name: _Place(own, matrix, None, first=number * matrix[0])
            for number, name in enumerate(names)
        }


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a Hugging Face tensor: the tensor of GGUF, and the first row in it."""

    name: str
    shape: tuple[int, ...]
    row_order: np.ndarray | None
    first: int = 0

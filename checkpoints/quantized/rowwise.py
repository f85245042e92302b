"""Matrices [out, in] stored row by row: 8-bit integers, 8-bit floats, or packed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from checkpoints.quantized.quantized_matrix import ALL, Encoding, full_rows, unpacked, words_of
from checkpoints.safetensors_reader import SafetensorsReader


@dataclass(frozen=True, slots=True)
class RowMatrix:
    """The matrix of one linear layer.

    Attributes:
        reader: reads the tensors.
        weight: name of the elements' tensor: int8 or e4m3 [out, in], or, with `packed_bits`, int32
            words [out, in * bits / 32] of unsigned fields, the middle of which stands for zero.
        scale: name of a scale for all, for each row [out] or [out, 1], for each group [out,
            groups], or for each block of `block_rows` rows and a group of inputs.
        zero: name of the zeros beside it, [out, groups] of signed integers, or, where elements are
            packed, words [out * bits / 32, groups].
        block_rows: rows that share a scale.
        packed_bits: 4 or 8; None: not packed.
        sorted: inputs in the order of the groups.
        input: scale of the activations; None: each token has its own.
    """

    reader: SafetensorsReader
    weight: str
    scale: str
    shape: tuple[int, int]
    stored: Encoding
    zero: str | None = None
    block_rows: int = 1
    packed_bits: int | None = None
    sorted: np.ndarray | None = field(default=None, repr=False)
    input: float | None = None

    @property
    def by_rows(self) -> bool:
        return True

    def elements(self, rows: slice, columns: slice = ALL) -> np.ndarray:
        own_rows = slice(*full_rows(rows, self.shape[0]))
        if self.packed_bits is None:
            return self.reader.read(self.weight, (own_rows, columns))
        # sorted columns come from anywhere
        wanted = columns if self.sorted is None else ALL
        which, own = words_of(wanted, self.shape[1], 32 // self.packed_bits)
        words = self.reader.read(self.weight, (own_rows, which))
        fields = unpacked(words, self.packed_bits)[:, own]
        if self.sorted is not None:
            fields = fields[:, self.sorted[columns]]
        return fields if self.packed_bits == 4 else (fields ^ np.uint8(0x80)).view(np.int8)

    def scales(self, rows: slice) -> np.ndarray:
        start, stop = full_rows(rows, self.shape[0])
        count = self.stored.groups(self.shape[1])
        info = self.reader.tensors[self.scale]
        if int(np.prod(info.shape)) == 1:
            one = self.reader.read(self.scale).astype(np.float32).reshape(1, 1)
            return np.repeat(np.repeat(one, stop - start, axis=0), count, axis=1)
        first, last = start // self.block_rows, -(-stop // self.block_rows)
        blocks = self.reader.read(self.scale, (slice(first, last),)).astype(np.float32)
        by_row = np.repeat(blocks.reshape(last - first, -1), self.block_rows, axis=0)
        skip = first * self.block_rows
        return by_row[start - skip : stop - skip]

    def zeros(self, rows: slice) -> np.ndarray:
        assert self.zero is not None
        if self.packed_bits is None:
            own_rows = slice(*full_rows(rows, self.shape[0]))
            return self.reader.read(self.zero, (own_rows,)).astype(np.int16)
        which, own = words_of(rows, self.shape[0], 32 // self.packed_bits)
        words = self.reader.read(self.zero, (which,))
        found = unpacked(np.ascontiguousarray(words.T), self.packed_bits).T[own]
        return found if self.packed_bits == 4 else found.astype(np.int16) - 128

    def order(self) -> np.ndarray | None:
        return self.sorted

    def input_scale(self) -> float | None:
        return self.input

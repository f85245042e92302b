"""The container: metadata and a table of tensors, then the tensors' bytes, aligned.

Format (ggml's docs/gguf.md): "GGUF", version, number of tensors, number of metadata pairs; pairs of
a key, a type and a value; for each tensor its name, dimensions with the fastest first, type and
offset from the aligned end of the table. Little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf.blocks import OTHER_TYPES, TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# of a value, by its type: all but strings (8) and arrays (9) have one size
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` has the fastest dimension last, `offset` is from the file's begin."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def row_bytes(self) -> int:
        """Of the last axis."""
        return self.shape[-1] // self.type.elements * self.type.bytes


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file, by its ending."""
    return str(path).lower().endswith(".gguf")


class GGUFFile:
    """Metadata and tensor table of a file; the bytes of tensors are read when asked for.

    Attributes:
        path: path of the file.
        metadata: values by key.
        tensors: by GGUF's own names.
    """

    def __init__(self, path: str | Path):
        """Reads the header.

        Raises:
            CheckpointError: no GGUF file, a version or a tensor type that is not read, or a file
                that is damaged or ends early.
        """
        self.path = Path(path)
        try:
            self._handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(path, f"cannot be opened ({error.strerror})") from error
        try:
            self._size = os.fstat(self._handle).st_size
            self.metadata, self.tensors = _Header(self.path, self._handle, self._size).read()
        except BaseException:
            self.close()
            raise

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """uint8 [rows, bytes of a row] of a tensor; its first axes are one.

        Raises:
            CheckpointError: the file has become shorter.
        """
        info = self.tensors[name]
        count = stop - start
        found = os.pread(self._handle, count * info.row_bytes, info.offset + start * info.row_bytes)
        if len(found) < count * info.row_bytes:
            raise CheckpointError(self.path, "the file ends inside it", name)
        return np.frombuffer(found, np.uint8).reshape(count, info.row_bytes)

    def close(self) -> None:
        """Closes the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class _Header:
    """Reads the header from its begin to its end, some bytes ahead."""

    def __init__(self, path: Path, handle: int, size: int):
        self._path, self._handle, self._size = path, handle, size
        self._block, self._block_start, self._at = b"", 0, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != MAGIC:
            raise CheckpointError(self._path, "it does not begin with GGUF: no GGUF file")
        (version,) = self._numbers("<I")
        if version not in VERSIONS:
            raise CheckpointError(self._path, f"GGUF version {version}, only 2 and 3 are read")
        num_tensors, num_pairs = self._numbers("<QQ")
        if max(num_tensors, num_pairs) * 8 > self._size:
            raise self._truncated(f"{num_tensors} tensors and {num_pairs} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text()
            (kind,) = self._numbers("<I")
            metadata[key] = self._value(kind, key)
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment % 8:
            raise CheckpointError(self._path, f"general.alignment={alignment!r}: a multiple of 8")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in table:
            if type_id not in TYPES:
                known = ", ".join(t.name for t in TYPES.values())
                told = OTHER_TYPES.get(type_id, f"of number {type_id}, which is not known,")
                problem = f"ggml's type {told} is not read; these are: {known}"
                raise CheckpointError(self._path, problem, name)
            if name in tensors:
                raise CheckpointError(self._path, "it is there twice", name)
            info = GGUFTensor(name, shape, TYPES[type_id], begin + offset)
            if shape[-1] % info.type.elements:
                raise CheckpointError(
                    self._path, f"shape {list(shape)} in blocks of {info.type.elements}", name
                )
            end = info.offset + math.prod(shape[:-1]) * info.row_bytes
            if end > self._size:
                problem = f"ends at byte {end} of a file of {self._size}: truncated"
                raise CheckpointError(self._path, problem, name)
            tensors[name] = info
        return metadata, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (count,) = self._numbers("<I")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise CheckpointError(self._path, f"{count} dimensions", name)
        sizes = self._numbers(f"<{count}Q")
        if min(sizes) < 1:
            raise CheckpointError(self._path, f"sizes {list(sizes)}", name)
        type_id, offset = self._numbers("<IQ")
        return name, tuple(reversed(sizes)), type_id, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            of, count = self._numbers("<IQ")
            if of == STRING:
                if count * 8 > self._size:
                    raise self._truncated(f"{count} texts of {key}")
                return [self._text() for _ in range(count)]
            if of not in SCALARS:
                raise CheckpointError(self._path, f"{key} is an array of type {of}")
            width = struct.calcsize(SCALARS[of])
            raw = self._take(width * count)
            return [value for (value,) in struct.iter_unpack(SCALARS[of], raw)]
        if kind not in SCALARS:
            raise CheckpointError(self._path, f"{key} is of type {kind}")
        return self._numbers(SCALARS[kind])[0]

    def _text(self) -> str:
        (length,) = self._numbers("<Q")
        # tokens of a vocabulary may be any bytes
        return self._take(length).decode("utf-8", "surrogateescape")

    def _numbers(self, format: str) -> tuple[Any, ...]:
        return struct.unpack(format, self._take(struct.calcsize(format)))

    def _take(self, count: int) -> bytes:
        skip = self._at - self._block_start
        if skip + count > len(self._block):
            if self._at + count > self._size:
                raise self._truncated(f"{count} bytes at byte {self._at}")
            self._block = os.pread(self._handle, max(count, READ_BYTES), self._at)
            self._block_start, skip = self._at, 0
            if len(self._block) < count:
                raise self._truncated(f"{count} bytes at byte {self._at}")
        self._at += count
        return self._block[skip : skip + count]

    def _truncated(self, wanted: str) -> CheckpointError:
        return CheckpointError(
            self._path, f"{wanted} in a file of {self._size}: truncated, or damaged"
        )

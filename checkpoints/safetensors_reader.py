"""Reads safetensors checkpoints, one file or many, slice by slice and never more than asked for.

Format: 8 bytes little-endian length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then
the tensors' bytes, row-major, little-endian, back to back. Slices are read into memory and not
mapped, so that nothing refers to the file afterwards and a file that shrinks gives an error.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.close import Closeable
from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOATS: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# with those that quantised matrices are made of
ALL_DTYPES: Mapping[str, np.dtype] = {
    **FLOATS,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}

# The format's own limit on the header, which keeps a garbage length from allocating memory.
_MAX_HEADER_BYTES = 100_000_000
# Rows that cannot be read straight to their place go through blocks of about this size, which stay
# in a core's cache.
_BLOCK_BYTES = 512 << 10
# A part of each row that is as large as a page of the disk's cache is read without the rest.
_PAGE_BYTES = 4 << 10
# What XLA asks of a host array that it takes over without a copy.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor: `offset` is its first byte in `file`; row-major, no padding."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that a CPU device takes as its own memory, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % _ALIGNMENT
    return memory[skip : skip + size].view(dtype).reshape(shape)


class SafetensorsReader(Closeable):
    """The tensors of one checkpoint folder (or of one .safetensors file).

    Opening reads and checks the headers only. Use as a context manager, or call `close`. Threads
    may read at the same time.

    Attributes:
        path: the folder or file.
        tensors: every tensor by name.
    """

    def __init__(self, path: str | Path, dtypes: Mapping[str, np.dtype] = FLOATS):
        """Opens `model.safetensors`, or the files that `model.safetensors.index.json` names.

        Args:
            path: folder or file.
            dtypes: that tensors may have, by the format's names.

        Raises:
            CheckpointError: a file is missing, damaged, or contradicts the index.
        """
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._dtypes = dtypes
        self._files: dict[Path, FileIO] = {}
        self._position = threading.Lock()
        try:
            for file, expected in _find_files(self.path).items():
                self._open(file, expected)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the part of it that `index` selects.

        Args:
            name: a key of `tensors`.
            index: one slice with step 1 for the first axis, or for the first two; the other axes
                are read whole.

        Returns:
            A fresh C-contiguous array in the checkpoint's dtype.

        Raises:
            CheckpointError: unknown name, or the file ends early.
        """
        info, bounds = self._find(name, index)
        out = aligned_empty([stop - start for start, stop in bounds], info.dtype)
        self._read_into(info, bounds, out)
        return out

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads as `read` does, to a given place and dtype.

        Args:
            name: a key of `tensors`.
            index: as for `read`.
            out: takes the elements in their order. An index of its first axis may hold several
                rows; it need not be contiguous.

        Raises:
            CheckpointError: as `read`.
        """
        info, bounds = self._find(name, index)
        if math.prod(stop - start for start, stop in bounds) != out.size:
            raise ValueError(f"{name}: {bounds} do not fill an array of shape {out.shape}")
        self._read_into(info, bounds, out)

    def close(self) -> None:
        """Closes the files; arrays that were read stay valid."""
        for handle in self._files.values():
            handle.close()
        self._files.clear()

    def _open(self, file: Path, expected: set[str] | None) -> None:
        try:
            handle = open(file, "rb", buffering=0)  # noqa: SIM115 (closed by close())
        except OSError as error:
            raise CheckpointError(file, f"cannot be opened ({error.strerror})") from error
        self._files[file] = handle
        for info in _read_header(file, handle, self._dtypes):
            other = self.tensors.get(info.name)
            if other is not None:
                raise CheckpointError(file, f"{other.file.name} has it too", info.name)
            self.tensors[info.name] = info
            if expected is not None:
                expected.discard(info.name)
        for name in sorted(expected or ()):
            raise CheckpointError(file, f"{INDEX_FILE} says it is in this file", name)

    def _find(
        self, name: str, index: tuple[slice, ...]
    ) -> tuple[TensorInfo, list[tuple[int, int]]]:
        """The tensor, and the first and the last index (exclusive) of each of its axes."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(self.path, "there is no such tensor", name)
        bounds = [(0, size) for size in info.shape]
        for axis, part in enumerate(index):
            start, stop, step = part.indices(info.shape[axis])
            if step != 1:
                raise ValueError(f"axis {axis} of {name}: step {step}, only 1 can be read")
            bounds[axis] = (start, max(start, stop))
        if any(bounds[axis] != (0, info.shape[axis]) for axis in range(2, len(bounds))):
            raise ValueError(f"{name}: only the first two axes can be cut")
        return info, bounds

    def _read_into(self, info: TensorInfo, bounds: list[tuple[int, int]], out: np.ndarray) -> None:
        if not out.size:
            return
        if not bounds:
            bounds, out = [(0, 1)], out.reshape(1)
        first, last = bounds[0]
        row_shape = info.shape[1:]
        row = math.prod(row_shape) * info.dtype.itemsize
        columns = slice(*bounds[1]) if len(bounds) > 1 else slice(0, 0)
        whole = len(bounds) == 1 or bounds[1] == (0, info.shape[1])
        if whole and out.dtype == info.dtype and out.flags.c_contiguous:
            self._read_bytes(info, first * row, out)
            return
        rows_an_index = (last - first) // len(out)
        column = row // row_shape[0] if row_shape else row
        taken = (columns.stop - columns.start) * column
        alone = not whole and taken >= _PAGE_BYTES and 2 * taken <= row
        step = max(1, _BLOCK_BYTES // ((taken if alone else row) * rows_an_index))
        for start in range(0, len(out), step):
            place = out[start : start + step]
            skip = first + start * rows_an_index
            count = len(place) * rows_an_index
            if alone:
                block = np.empty((count, columns.stop - columns.start, *row_shape[1:]), info.dtype)
                for number, part in enumerate(block, skip):
                    self._read_bytes(info, number * row + columns.start * column, part)
            else:
                block = np.empty((count, *row_shape), info.dtype)
                self._read_bytes(info, skip * row, block)
                block = block if whole else block[:, columns]
            place[...] = block.reshape(place.shape)

    def _read_bytes(self, info: TensorInfo, skip: int, out: np.ndarray) -> None:
        handle = self._files[info.file]
        target = out.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(target):
            # One call reads at most 2 GiB on Linux and may stop early.
            count = self._read_at(handle, info.offset + skip + done, target[done:])
            if not count:
                raise CheckpointError(info.file, "the file ends inside it", info.name)
            done += count

    def _read_at(self, handle: FileIO, offset: int, place: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(handle.fileno(), [place], offset)
        # Windows and macOS: threads share the handle's position
        with self._position:
            handle.seek(offset)
            return handle.readinto(place)


def _find_files(path: Path) -> dict[Path, set[str] | None]:
    """File -> names that the index promises in it (None without an index)."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise CheckpointError(path, "no such file or folder")
    if (path / SINGLE_FILE).is_file():
        return {path / SINGLE_FILE: None}
    index = path / INDEX_FILE
    if not index.is_file():
        found = sorted(file.name for file in path.iterdir() if file.is_file())
        raise CheckpointError(
            path,
            f"neither {SINGLE_FILE} nor {INDEX_FILE} is in the folder; it holds "
            f"{', '.join(found) or 'no files'} (only safetensors checkpoints are read)",
        )
    try:
        weight_map = (read_object(index) or {})["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise CheckpointError(index, f"file name {file!r} leaves the folder", name)
            promised = files.setdefault(path / file, set())
            assert promised is not None
            promised.add(name)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(index, f"not a safetensors index ({error!r})") from error
    for file, names in files.items():
        if not file.is_file():
            count = len(names or ())
            raise CheckpointError(file, f"missing, though {INDEX_FILE} puts {count} tensors in it")
    return files


def _read_header(file: Path, handle: FileIO, dtypes: Mapping[str, np.dtype]) -> list[TensorInfo]:
    size = file.stat().st_size
    prefix = handle.read(8)
    if len(prefix) < 8:
        raise CheckpointError(file, f"{size} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            file, f"header of {length} bytes in a file of {size}: truncated, or not safetensors"
        )
    try:
        header = json.loads(handle.read(length).decode("utf-8"))
        if not isinstance(header, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise CheckpointError(file, f"unreadable header ({error})") from error
    header.pop("__metadata__", None)
    infos = [
        _tensor_info(file, name, entry, 8 + length, size, dtypes) for name, entry in header.items()
    ]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    end = 8 + length
    for info in infos:
        if info.offset < end:
            raise CheckpointError(file, "its bytes overlap another tensor's", info.name)
        end = info.offset + info.nbytes
    return infos


def _tensor_info(
    file: Path, name: str, entry: Any, base: int, size: int, dtypes: Mapping[str, np.dtype]
) -> TensorInfo:
    try:
        code, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        sizes_valid = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(file, f"malformed header entry {entry!r}", name) from error
    if not sizes_valid or not isinstance(code, str):
        raise CheckpointError(file, f"malformed header entry {entry!r}", name)
    if code not in dtypes:
        raise CheckpointError(file, f"dtype {code}, only {', '.join(dtypes)} are read", name)
    info = TensorInfo(name, file, dtypes[code], shape, base + begin)
    if end - begin != info.nbytes:
        raise CheckpointError(file, f"{end - begin} bytes for shape {list(shape)} of {code}", name)
    if base + end > size:
        raise CheckpointError(
            file, f"ends at byte {base + end} of a file of {size}: truncated", name
        )
    return info

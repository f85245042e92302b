"""A store's record of itself: its arrays, its files with their checksums, how it was made."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_object

RECORD_FILE = "orbax_store.json"
WEIGHTS = "weights"
FORMAT, VERSION = "jaxserve-orbax", 1
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array: its shape and the NumPy name of its type."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Part:
    """One Orbax checkpoint of a store, in `weights/<name>`.

    Attributes:
        leaves: the arrays by their names.
        files: size in bytes and CRC-32 of each file, by its path in the part.
    """

    leaves: dict[str, Leaf]
    files: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Record:
    """The content of `orbax_store.json`.

    Attributes:
        about: facts that are read back when the model is loaded, of JSON's types.
        parts: the Orbax checkpoints, by name.
        source: its source, so that an interrupted conversion can go on; "" when done.
        small_files: size and CRC-32 of the other files of the model folder.
    """

    about: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)
    source: str = ""
    small_files: dict[str, tuple[int, int]] = field(default_factory=dict)

    def leaves(self) -> dict[str, Leaf]:
        """Of all parts."""
        return {name: leaf for part in self.parts.values() for name, leaf in part.leaves.items()}

    def save(self, folder: Path) -> None:
        """Write it, at once."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)
        new = folder / f"{RECORD_FILE}.new"
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / RECORD_FILE)


def is_store(path: str | Path) -> bool:
    """Whether a folder is a store, by the file that says so."""
    return (Path(path) / RECORD_FILE).is_file()


def read_record(path: str | Path) -> Record:
    """Reads and judges `orbax_store.json`.

    Raises:
        CheckpointError: it is missing, no such record, or of another version.
    """
    file = Path(path) / RECORD_FILE
    values = read_object(file)
    if values is None:
        raise CheckpointError(path, f"no {RECORD_FILE} is in the folder")
    if values.get("format") != FORMAT:
        raise CheckpointError(file, f"not a record of format {FORMAT!r}")
    if values.get("version") != VERSION:
        raise CheckpointError(
            file, f"version={values.get('version')!r} is not supported: {VERSION}; convert again"
        )
    try:
        about = dict(values["about"])
        parts = {_plain(file, name): _part(file, p) for name, p in values["parts"].items()}
        small = {_plain(file, n): _sizes(pair) for n, pair in values["small_files"].items()}
        return Record(about, parts, str(values["source"]), small)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(file, f"damaged ({error!r})") from error


def checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return size, crc


def _part(file: Path, values: Mapping[str, Any]) -> Part:
    leaves = {}
    for name, leaf in values["leaves"].items():
        shape = tuple(leaf["shape"])
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape {list(shape)} of {name}")
        leaves[name] = Leaf(shape, str(leaf["dtype"]))
    files = {_inside(file, name): _sizes(pair) for name, pair in values["files"].items()}
    if not leaves or not files:
        raise ValueError("a part of nothing")
    return Part(leaves, files)


def _sizes(pair: Any) -> tuple[int, int]:
    size, crc = pair
    if type(size) is not int or type(crc) is not int:
        raise ValueError(f"{pair} is no size and checksum")
    return size, crc


def _inside(file: Path, name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise CheckpointError(file, f"file name {name!r} leaves the folder")
    return name


def _plain(file: Path, name: str) -> str:
    if Path(name).name != name:
        raise CheckpointError(file, f"name {name!r} leaves the folder")
    return name

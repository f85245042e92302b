"""Reads a store: every file is checked against its size and checksum, then restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, TensorMismatchError
from checkpoints.store.orbax import array_file, restore_arrays
from checkpoints.store.record import RECORD_FILE, WEIGHTS, Part, checksum, read_record


def restore_store(
    path: Path,
    wanted: Mapping[str, Any],
    told: Callable[[int, int], Any] = lambda done, total: None,
    *,
    mapped: bool = False,
) -> dict[str, Any]:
    """All arrays of a store, each straight to its devices.

    Args:
        path: the folder.
        wanted: name -> something with `shape`, `dtype` and `sharding`: all that the store has, and
            nothing else. Floats are cast to the type.
        told: how many bytes of files have been restored, and of how many, after each part.
        mapped: leave the arrays in their files: NumPy arrays that read them, and cannot be written.

    Raises:
        TensorMismatchError: names or shapes differ; lists every difference.
        CheckpointError: a file is missing, cut, or has changed; or an array is to be `mapped` and
            its file has it in another form or type.
    """
    path = path.absolute()  # Orbax takes no other
    record = read_record(path)
    _check_leaves(path, record.leaves(), wanted)
    for name, pair in record.small_files.items():
        _check_file(path / name, pair, path)
    for name, part in record.parts.items():
        _check_sizes(path / WEIGHTS / name, part)
    sizes = {name: sum(n for n, _ in part.files.values()) for name, part in record.parts.items()}
    done = 0
    found: dict[str, Any] = {}
    # checksums of the next part are computed, and its files read, while one is restored
    with ThreadPoolExecutor(1) as pool:
        checks = [
            pool.submit(_check_part, path / WEIGHTS / name, part)
            for name, part in record.parts.items()
        ]
        try:
            for check, (name, part) in zip(checks, record.parts.items(), strict=True):
                check.result()
                own = {leaf: wanted[leaf] for leaf in part.leaves}
                place = path / WEIGHTS / name
                found |= _mapped(place, own, part) if mapped else restore_arrays(place, own)
                done += sizes[name]
                told(done, sum(sizes.values()))
        finally:
            for check in checks:
                check.cancel()
    return found


def _mapped(folder: Path, wanted: Mapping[str, Any], part: Part) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, like in wanted.items():
        dtype, stored = np.dtype(like.dtype), part.leaves[name].dtype
        file = array_file(folder, name)
        if dtype.name != stored or file is None:
            kind = f"of {stored}, not {dtype}" if dtype.name != stored else "in several pieces"
            problem = f"it cannot be mapped, for it is {kind}: convert again on this device"
            raise CheckpointError(folder, problem, name)
        found[name] = np.asarray(np.memmap(file, dtype, "r", shape=like.shape))
    return found


def _check_leaves(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    missing = [name for name in wanted if name not in stored]
    unexpected = sorted(name for name in stored if name not in wanted)
    wrong = {
        name: (tuple(like.shape), stored[name].shape)
        for name, like in wanted.items()
        if name in stored and stored[name].shape != tuple(like.shape)
    }
    if missing or unexpected or wrong:
        raise TensorMismatchError(path, missing, unexpected, wrong)


def _check_sizes(folder: Path, part: Part) -> None:
    for name, (size, _) in part.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(file, f"missing, though {RECORD_FILE} names it")
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(file, f"{found} bytes, and {RECORD_FILE} says {size}: truncated")


def _check_part(folder: Path, part: Part) -> None:
    for name, pair in part.files.items():
        _check_file(folder / name, pair, folder)


def _check_file(file: Path, pair: tuple[int, int], folder: Path) -> None:
    try:
        found = checksum(file)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror})") from error
    if found != pair:
        raise CheckpointError(file, f"its checksum is not the one that {RECORD_FILE} says: damaged")

"""The one file that knows Orbax: how the arrays of a part are written and restored."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError

# restored at once: what is read lies beside what is made of it
RESTORE_BYTES = 256 << 20
SHARD_INDEX_BYTES = 20


def save_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays of any sharding as one Orbax checkpoint; the folder must not exist.

    Plain files, a chunk for each shard, without compression: weights hardly become smaller.

    Raises:
        CheckpointError: they cannot be written, for lack of room for example.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    try:
        with _without_words_of_merging(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))
    except Exception as error:  # tensorstore raises ValueError where a file cannot be written
        raise CheckpointError(folder, f"cannot be written ({_first_line(error)})") from error


@contextmanager
def _without_words_of_merging() -> Iterator[None]:
    """Orbax warns that there is nothing of another format to be merged."""

    def is_other(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def restore_arrays(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read arrays, each straight to its devices.

    Args:
        folder: the folder that `save_arrays` wrote.
        wanted: name -> something with `shape`, `dtype` and `sharding`; floats are cast.

    Raises:
        CheckpointError: they cannot be read.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    found: dict[str, Any] = {}
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            for names in _batches(wanted):
                how = {
                    name: ocp.ArrayRestoreArgs(
                        sharding=wanted[name].sharding,
                        global_shape=wanted[name].shape,
                        dtype=wanted[name].dtype,
                    )
                    for name in names
                }
                tree = dict.fromkeys(names, 0)
                restore = ocp.args.PyTreeRestore(item=tree, restore_args=how, partial_restore=True)
                found |= checkpointer.restore(folder, args=restore)
    except Exception as error:  # tensorstore raises ValueError, Orbax a dozen kinds
        raise CheckpointError(folder, f"cannot be restored ({_first_line(error)})") from error
    return found


def array_file(folder: Path, name: str) -> Path | None:
    """The file of a part that begins with an array's numbers, in C order and little-endian.

    None: the array is in several pieces, as one cut for several devices, or compressed.
    """
    about = json.loads((folder / name / "zarr.json").read_text())
    shape, grid, shard = about["shape"], about["chunk_grid"], about["codecs"][0]
    inner = shard.get("configuration", {})
    cuts = grid["configuration"]["chunk_shape"], inner.get("chunk_shape")
    codecs = inner.get("codecs", [])
    order = codecs[0].get("configuration", {}).get("endian", "little") if codecs else None
    if cuts != (shape, shape) or [c["name"] for c in codecs] != ["bytes"] or order != "little":
        return None
    file = (folder / name / "c").joinpath(*"0" * len(shape))
    with open(file, "rb") as opened:
        # behind its only chunk: where that begins, its size and a checksum of both
        opened.seek(-SHARD_INDEX_BYTES, os.SEEK_END)
        begin = int.from_bytes(opened.read(8), "little")
    return file if begin == 0 else None


def _batches(wanted: Mapping[str, Any]) -> list[list[str]]:
    """Names in order, together at most `RESTORE_BYTES` where they can be."""
    batches: list[list[str]] = []
    room = 0
    for name, like in wanted.items():
        size = int(np.prod(like.shape)) * np.dtype(like.dtype).itemsize
        if not batches or size > room:
            batches.append([])
            room = RESTORE_BYTES
        batches[-1].append(name)
        room -= size
    return batches


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]

"""Writes a store: part by part, each recorded when it is whole, the folder in its place at last."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoints.errors import CheckpointError
from checkpoints.store.orbax import save_arrays
from checkpoints.store.publish import check_place, partial_folder, publish, sync_file
from checkpoints.store.record import (
    RECORD_FILE,
    WEIGHTS,
    Leaf,
    Part,
    Record,
    checksum,
    read_record,
)

logger = logging.getLogger(__name__)

PART_BYTES = 256 << 20
# of a model folder, beside the weights
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def write_store(
    out: Path,
    arrays: Mapping[str, Any],
    *,
    about: Mapping[str, Any],
    small_files: Mapping[str, bytes],
    read: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
    source: str = "",
    use_tqdm: bool = False,
) -> Record:
    """Write a store in place of an older one, or none.

    What was written by a call of the same `source` that was ended is not written again.

    Args:
        out: the folder; absent, empty, or a store.
        arrays: JAX or NumPy arrays by name; with `read` their shapes and types are enough.
        about: see `Record`.
        small_files: name -> content of the model folder's other files, config.json among them.
        read: gives arrays by their names, those of a part at a time.
        source: what the arrays come from; "" never goes on with what is there.
        use_tqdm: show a progress bar where standard error is a terminal.

    Raises:
        CheckpointError: the place holds something else, or there is no room.
    """
    out = out.absolute()
    check_place(out, RECORD_FILE)
    folder = partial_folder(out)
    try:
        record = _begun(folder, about, source)
        parts = dict(_parts(arrays))
        with tqdm(total=len(parts), desc="writing", disable=None if use_tqdm else True) as bar:
            for name, wanted in parts.items():
                if not _is_done(folder, record, name, wanted):
                    whole = wanted if read is None else read(list(wanted))
                    record.parts[name] = _write_part(folder / WEIGHTS / name, whole)
                    record.save(folder)
                bar.update()
        for name, content in small_files.items():
            (folder / name).write_bytes(content)
            sync_file(folder / name)
            record.small_files[name] = checksum(folder / name)
        done = Record(dict(about), record.parts, "", record.small_files)
        done.save(folder)
    except OSError as error:
        raise CheckpointError(out, f"cannot be written ({error})") from error
    finally:
        if not source and folder.is_dir() and not _is_finished(folder):
            shutil.rmtree(folder, ignore_errors=True)
    publish(folder, out)
    return done


def small_files_of(model: Path) -> dict[str, bytes]:
    """The small files of a model folder that a store has too."""
    found = {}
    for name in SMALL_FILES:
        file = model / name
        if file.is_file():
            found[name] = file.read_bytes()
    return found


def source_of(model: Path, about: Mapping[str, Any]) -> str:
    """The identity of a conversion: files, their sizes and times, and facts."""
    kinds = (".safetensors", RECORD_FILE)
    files = sorted(file for file in model.iterdir() if file.name.endswith(kinds))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps([str(model.absolute()), stats, dict(about)], sort_keys=True)


def _begun(folder: Path, about: Mapping[str, Any], source: str) -> Record:
    """The record of what is in the folder already, or a new one."""
    if folder.is_dir():
        try:
            record = read_record(folder)
        except CheckpointError as error:  # of a run that was ended before it had a whole record
            logger.info("begun again: %s", error)
        else:
            if source and record.source == source:
                return record
        shutil.rmtree(folder)
    (folder / WEIGHTS).mkdir(parents=True)
    record = Record(dict(about), source=source)
    record.save(folder)
    return record


def _is_finished(folder: Path) -> bool:
    try:
        return not read_record(folder).source and bool(read_record(folder).small_files)
    except CheckpointError:
        return False


def _parts(arrays: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arrays in their order, so many together that a part has about `PART_BYTES`."""
    part: dict[str, Any] = {}
    size = count = 0
    for name, array in arrays.items():
        part[name] = array
        size += array.size * np.dtype(array.dtype).itemsize
        if size >= PART_BYTES:
            yield f"{count:05}", part
            part, size, count = {}, 0, count + 1
    if part:
        yield f"{count:05}", part


def _is_done(folder: Path, record: Record, name: str, arrays: Mapping[str, Any]) -> bool:
    part = record.parts.get(name)
    if part is None or part.leaves != _leaves(arrays):
        return False
    place = folder / WEIGHTS / name
    return all((place / file).is_file() for file in part.files) and all(
        checksum(place / file) == pair for file, pair in part.files.items()
    )


def _write_part(place: Path, arrays: Mapping[str, Any]) -> Part:
    if place.exists():
        shutil.rmtree(place)
    save_arrays(place, arrays)
    files = {}
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        sync_file(file)
        files[file.relative_to(place).as_posix()] = checksum(file)
    return Part(_leaves(arrays), files)


def _leaves(arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    return {name: Leaf(tuple(a.shape), np.dtype(a.dtype).name) for name, a in arrays.items()}

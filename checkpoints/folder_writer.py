"""Writes model folders of Hugging Face: safetensors in several files, in its place at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.safetensors_reader import INDEX_FILE, SINGLE_FILE
from checkpoints.store.publish import check_place, partial_folder, publish, sync_file

FILE_BYTES = 2 << 30


class FolderWriter:
    """A model folder that grows beside its place; a context manager.

    `finish` puts it there; without, nothing is left of it.
    """

    def __init__(self, out: str | Path, file_bytes: int = FILE_BYTES):
        """Begins a folder.

        Args:
            out: absent, or empty.
            file_bytes: tensors of about so many bytes are held and written as one file.

        Raises:
            CheckpointError: `out` holds something.
        """
        self.out = Path(out).absolute()
        check_place(self.out)
        self._folder = partial_folder(self.out)
        self._file_bytes = file_bytes
        self._held: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []
        self._bytes = 0

    def __enter__(self) -> FolderWriter:
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir()
        except OSError as error:
            raise CheckpointError(self.out, f"cannot be written ({error})") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take tensors by their names.

        Raises:
            CheckpointError: there is no room.
        """
        for name, tensor in tensors.items():
            if name in self._held or any(name in names for names in self._files):
                raise CheckpointError(self.out, "it was written already", name)
            self._held[name] = np.ascontiguousarray(tensor).reshape(tensor.shape)
        if sum(tensor.nbytes for tensor in self._held.values()) >= self._file_bytes:
            self._write()

    def finish(self, small_files: Mapping[str, bytes]) -> None:
        """Write what is held, the index and the other files, and put the folder in its place.

        Raises:
            CheckpointError: there is no room.
        """
        if self._held:
            self._write()
        try:
            for name, content in (self._named() | dict(small_files)).items():
                (self._folder / name).write_bytes(content)
                sync_file(self._folder / name)
        except OSError as error:
            raise CheckpointError(self.out, f"cannot be written ({error})") from error
        publish(self._folder, self.out)

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        file = self._folder / f"{len(self._files)}.safetensors"
        try:
            save_file(self._held, file, metadata={"format": "pt"})
            file.chmod(0o644)  # the library makes it for its owner alone
            sync_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(self.out, f"cannot be written ({error})") from error
        self._files.append(list(self._held))
        self._bytes += sum(tensor.nbytes for tensor in self._held.values())
        self._held = {}

    def _named(self) -> dict[str, bytes]:
        """Files get their final names; the index, where there are several."""
        count = len(self._files)
        if count == 1:
            (self._folder / "0.safetensors").rename(self._folder / SINGLE_FILE)
            return {}
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self._folder / f"{number}.safetensors").rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        return {INDEX_FILE: json.dumps(index, indent=1).encode()}


def write_folder(
    out: str | Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    small_files: Mapping[str, bytes],
) -> None:
    """Write a model folder of tensors that come one after the other.

    Raises:
        CheckpointError: the folder holds something already, or there is no room.
    """
    with FolderWriter(out) as writer:
        for name, tensor in tensors:
            writer.add({name: tensor})
        writer.finish(small_files)

"""Errors about checkpoint files; each names the file, and the tensor where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint cannot be read.

    Attributes:
        path: the file or folder at fault.
        tensor: name of the tensor at fault, None when it is the file as a whole.
    """

    def __init__(self, path: str | Path, problem: str, tensor: str | None = None):
        where = f"{path}" if tensor is None else f"{path}, tensor {tensor!r}"
        super().__init__(f"{where}: {problem}")
        self.path = Path(path)
        self.tensor = tensor


MAX_NAMED = 5  # tensors of each kind of difference in a message


class TensorMismatchError(CheckpointError):
    """The tensors of a checkpoint are not those that the model needs.

    The message counts all and names the first `MAX_NAMED` of each kind.

    Attributes:
        missing: names that the model needs and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model has no place for.
        wrong_shape: name -> (expected shape, shape found).
    """

    def __init__(
        self,
        path: str | Path,
        missing: Sequence[str],
        unexpected: Sequence[str],
        wrong_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    ):
        lines = []
        if missing:
            lines.append(f"{len(missing)} missing: {_named(missing)}")
        if unexpected:
            lines.append(f"{len(unexpected)} unexpected: {_named(unexpected)}")
        if wrong_shape:
            shapes = [
                f"{name} (expected {list(expected)}, found {list(found)})"
                for name, (expected, found) in wrong_shape.items()
            ]
            lines.append(f"{len(wrong_shape)} of wrong shape: {_named(shapes)}")
        super().__init__(path, "tensors do not fit the model's config\n  " + "\n  ".join(lines))
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.wrong_shape = dict(wrong_shape)


def _named(tensors: Sequence[str]) -> str:
    more = len(tensors) - MAX_NAMED
    return ", ".join(tensors[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

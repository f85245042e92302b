"""Reads a safetensors checkpoint of quantised matrices, dequantised or as stored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from checkpoints.close import Closeable
from checkpoints.errors import CheckpointError
from checkpoints.quantized.quantized_matrix import Matrix
from checkpoints.quantized.tensor_parts import HasShape, Part, Shape
from checkpoints.safetensors_reader import FLOATS, SafetensorsReader
from checkpoints.text_names import text_name


class QuantizedReader(Closeable):
    """The tensors of a checkpoint of which some are quantised.

    Attributes:
        path: path of the checkpoint.
        format: name of the format, such as "awq".
        matrices: the quantised ones, by the name of the weight that each stands for.
        tensors: these and all others; those of a text model by the names that it has alone.
        zero_biases: biases of quantised layers that are 0, which tools write whether the model has
            any or not.
    """

    def __init__(
        self,
        reader: SafetensorsReader,
        format: str,
        matrices: Mapping[str, Matrix],
        parts: set[str],
    ):
        """`parts` are the names of the tensors that the matrices are made of."""
        self.path = reader.path
        self.format = format
        self.matrices = {text_name(name): matrix for name, matrix in matrices.items()}
        self._reader = reader
        own = [name for name in reader.tensors if name not in parts and name not in matrices]
        self._stored = {text_name(name): name for name in own}
        if len(self._stored) + len(self.matrices) != len(own) + len(matrices):
            raise CheckpointError(self.path, "the text model is there twice, by two prefixes")
        rest = {name: reader.tensors[stored] for name, stored in self._stored.items()}
        self.tensors: dict[str, HasShape] = {
            **rest,
            **{name: Shape(matrix.shape) for name, matrix in self.matrices.items()},
        }
        modules = (name.rpartition(".")[0] for name in self.matrices)
        self.zero_biases = frozenset(
            name
            for name in (f"{module}.bias" for module in modules)
            if name in rest and not reader.read(self._stored[name]).any()
        )
        for name, info in rest.items():
            if info.dtype not in FLOATS.values():
                problem = f"{info.dtype.name}, and it is no part of a matrix that {format} stores"
                raise CheckpointError(self.path, problem, name)

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """As `SafetensorsReader.read_into`; a quantised matrix is dequantised.

        Raises:
            CheckpointError: as there, and for scales that are not finite.
        """
        matrix = self.matrices.get(name)
        if matrix is None:
            self._reader.read_into(self._stored.get(name, name), index, out)
        else:
            Part(self.matrices, "values").read_into(name, index, out)

    def close(self) -> None:
        """Closes the files."""
        self._reader.close()

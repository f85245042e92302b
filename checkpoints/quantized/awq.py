"""AWQ checkpoints (Lin et al., "AWQ: Activation-aware weight quantization", 2023), GEMM layout.

A linear layer has three tensors: qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8]
and scales [in / group, out]. Field i (4 bits) of a word is output 8 * word + ORDER[i].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.fields import Fields, is_listed
from checkpoints.quantized.quantized_matrix import (
    ALL,
    Encoding,
    Matrix,
    check_finite,
    full_rows,
    unpacked,
    words_of,
)
from checkpoints.safetensors_reader import SafetensorsReader

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PER_WORD = 8
PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """The matrix of one linear layer; `module` is its name."""

    reader: SafetensorsReader
    module: str
    shape: tuple[int, int]
    stored: Encoding

    @property
    def by_rows(self) -> bool:
        return False

    def elements(self, rows: slice, columns: slice = ALL) -> np.ndarray:
        return self._by_output("qweight", rows, columns)

    def scales(self, rows: slice) -> np.ndarray:
        start, stop = full_rows(rows, self.shape[0])
        found = self.reader.read(f"{self.module}.scales", (slice(None), slice(start, stop)))
        return np.ascontiguousarray(found.T.astype(np.float32))

    def zeros(self, rows: slice) -> np.ndarray:
        return self._by_output("qzeros", rows)

    def order(self) -> None:
        return None

    def input_scale(self) -> None:
        return None

    def _by_output(self, part: str, rows: slice, columns: slice = ALL) -> np.ndarray:
        which, own = words_of(rows, self.shape[0], PER_WORD)
        words = self.reader.read(f"{self.module}.{part}", (columns, which))
        return np.ascontiguousarray(unpacked(words, 4, ORDER)[:, own].T)


def read_awq(fields: Fields, reader: SafetensorsReader) -> dict[str, Matrix]:
    """The quantised matrices of an AWQ checkpoint.

    Raises:
        CheckpointError: an option that is not read, or tensors that contradict the config.
    """
    fields.one_of("bits" if fields.get("w_bit") is None else "w_bit", (4,), 4)
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    group_name = "group_size" if fields.get("q_group_size") is None else "q_group_size"
    group = fields.group(group_name)
    zeros = "integer" if fields.flag("zero_point", True) else "none"
    skipped = fields.names("modules_to_not_convert")
    found: dict[str, Matrix] = {}
    for name, info in reader.tensors.items():
        module, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        if is_listed(module, skipped):
            raise CheckpointError(
                reader.path, "modules_to_not_convert says that it is not quantised", name
            )
        if len(info.shape) != 2:
            raise CheckpointError(reader.path, f"shape {list(info.shape)} of a matrix", name)
        inputs, outputs = info.shape[0], info.shape[1] * PER_WORD
        stored = Encoding("int4", group, zeros)
        groups = stored.groups(inputs)
        expect(reader, name, (inputs, outputs // PER_WORD), ("int32",))
        expect(reader, f"{module}.scales", (groups, outputs), SCALE_TYPES)
        stored = replace(stored, scales=reader.tensors[f"{module}.scales"].dtype.name)
        if zeros == "integer":
            expect(reader, f"{module}.qzeros", (groups, outputs // PER_WORD), ("int32",))
        check_divides(reader, name, group, inputs)
        check_finite(reader.path, f"{module}.scales", reader.read(f"{module}.scales"))
        found[f"{module}.weight"] = AwqMatrix(reader, module, (outputs, inputs), stored)
    return found


SCALE_TYPES = ("float16", "bfloat16", "float32")


def expect(
    reader: SafetensorsReader, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    """Refuses a tensor that is missing or is not of the shape and type that others imply.

    Raises:
        CheckpointError: names the tensor, what it is and what it should be.
    """
    info = reader.tensors.get(name)
    if info is None:
        raise CheckpointError(reader.path, "it is missing", name)
    if info.shape != shape or info.dtype.name not in dtypes:
        raise CheckpointError(
            reader.path,
            f"it is {info.dtype.name}{list(info.shape)}, and the quantization_config and the "
            f"tensors beside it want {' or '.join(dtypes)}{list(shape)}",
            name,
        )


def check_divides(reader: SafetensorsReader, name: str, group: int | None, inputs: int) -> None:
    """Refuses a group size that does not divide the inputs of a matrix."""
    if group is not None and inputs % group:
        raise CheckpointError(
            reader.path, f"group_size {group} does not divide {inputs} inputs", name
        )

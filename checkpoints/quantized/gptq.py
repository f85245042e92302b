"""GPTQ checkpoints (Frantar et al., "GPTQ: Accurate post-training quantization", 2022).

A linear layer has qweight int32 [in * bits / 32, out], which packs neighbouring inputs, qzeros
int32 [groups, out * bits / 32], which packs neighbouring outputs, scales [groups, out] and g_idx
int32 [in], the group of each input. The first format of the checkpoints ("gptq") stores zero - 1,
"gptq_v2" the zero itself. Quantisation in the order of activation sizes (desc_act, "act-order")
makes g_idx irregular: then the matrix is that of the inputs sorted by group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.awq import SCALE_TYPES, check_divides, expect
from checkpoints.quantized.fields import Fields
from checkpoints.quantized.quantized_matrix import (
    ALL,
    INT4_ZERO,
    Encoding,
    Matrix,
    check_finite,
    full_rows,
    unpacked,
    words_of,
)
from checkpoints.safetensors_reader import SafetensorsReader

PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """The matrix of one linear layer; `module` is its name, `bits` 4 or 8."""

    reader: SafetensorsReader
    module: str
    shape: tuple[int, int]
    stored: Encoding
    bits: int
    version: int
    sorted: np.ndarray | None = field(default=None, repr=False)

    @property
    def by_rows(self) -> bool:
        return False

    def elements(self, rows: slice, columns: slice = ALL) -> np.ndarray:
        start, stop = full_rows(rows, self.shape[0])
        # sorted columns come from anywhere
        wanted = columns if self.sorted is None else ALL
        which, own = words_of(wanted, self.shape[1], 32 // self.bits)
        words = self.reader.read(f"{self.module}.qweight", (which, slice(start, stop)))
        outputs = unpacked(np.ascontiguousarray(words.T), self.bits)[:, own]
        if self.sorted is not None:
            outputs = outputs[:, self.sorted[columns]]
        # 8 bits: the unsigned numbers less 128
        return outputs if self.bits == 4 else (outputs ^ np.uint8(0x80)).view(np.int8)

    def scales(self, rows: slice) -> np.ndarray:
        start, stop = full_rows(rows, self.shape[0])
        found = self.reader.read(f"{self.module}.scales", (slice(None), slice(start, stop)))
        return np.ascontiguousarray(found.T.astype(np.float32))

    def zeros(self, rows: slice) -> np.ndarray:
        return gptq_zeros(self.reader, self.module, self.bits, self.version, rows, self.shape[0])

    def order(self) -> np.ndarray | None:
        return self.sorted

    def input_scale(self) -> None:
        return None


def gptq_zeros(
    reader: SafetensorsReader, module: str, bits: int, version: int, rows: slice, outputs: int
) -> np.ndarray:
    """Zeros [rows, groups]: uint8 of 4 bits; int16 of 8 bits, less 128 like the elements."""
    which, own = words_of(rows, outputs, 32 // bits)
    words = reader.read(f"{module}.qzeros", (ALL, which))
    zeros = unpacked(words, bits)[:, own].T.astype(np.int16)
    if version == 1:
        zeros = (zeros + 1) & ((1 << bits) - 1)  # packed less one, modulo the largest
    return np.ascontiguousarray(zeros.astype(np.uint8) if bits == 4 else zeros - 128)


def read_gptq(fields: Fields, reader: SafetensorsReader) -> dict[str, Matrix]:
    """The quantised matrices of a GPTQ checkpoint.

    Raises:
        CheckpointError: an option that is not read, or tensors that contradict the config.
    """
    bits = fields.one_of("bits", (4, 8))
    version = {"gptq": 1, "gptq_v2": 2}[
        fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    ]
    exceptions = fields.get("dynamic")
    # "-:" names modules that are not quantised: they have no qweight
    if exceptions and not all(str(name).startswith("-:") for name in exceptions):
        raise fields.error("dynamic", exceptions, "one scheme for all layers but those left out")
    group = fields.group()
    symmetric, act_order = fields.flag("sym", True), fields.flag("desc_act", False)
    found: dict[str, Matrix] = {}
    for name, info in reader.tensors.items():
        module, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        per_word = 32 // bits
        if len(info.shape) != 2:
            raise CheckpointError(reader.path, f"shape {list(info.shape)} of a matrix", name)
        inputs, outputs = info.shape[0] * per_word, info.shape[1]
        kind = "int4" if bits == 4 else "int8"
        stored = Encoding(kind, group, "none" if symmetric else "integer")
        groups = stored.groups(inputs)
        expect(reader, name, (inputs // per_word, outputs), ("int32",))
        expect(reader, f"{module}.scales", (groups, outputs), SCALE_TYPES)
        stored = replace(stored, scales=reader.tensors[f"{module}.scales"].dtype.name)
        expect(reader, f"{module}.qzeros", (groups, outputs // per_word), ("int32",))
        check_divides(reader, name, group, inputs)
        check_finite(reader.path, f"{module}.scales", reader.read(f"{module}.scales"))
        if symmetric:
            zeros = gptq_zeros(reader, module, bits, version, slice(None), outputs)
            middle = INT4_ZERO if bits == 4 else 0
            if (zeros != middle).any():
                raise CheckpointError(
                    reader.path,
                    "quantization_config.sym is true, but not all zero points are "
                    f"{1 << (bits - 1)}",
                    f"{module}.qzeros",
                )
        order = _order(reader, module, group, inputs)
        if order is not None and not act_order:
            raise CheckpointError(
                reader.path, "quantization_config.desc_act is false", f"{module}.g_idx"
            )
        if order is not None:
            stored = replace(stored, ordered=True)
        found[f"{module}.weight"] = GptqMatrix(
            reader, module, (outputs, inputs), stored, bits, version, order
        )
    return found


def _order(
    reader: SafetensorsReader, module: str, group: int | None, inputs: int
) -> np.ndarray | None:
    """Inputs in the order of their groups; None where they are in it as they stand."""
    name = f"{module}.g_idx"
    if name not in reader.tensors or group is None:
        return None
    expect(reader, name, (inputs,), ("int32", "int64"))
    return group_order(reader, name, reader.read(name), group)


def group_order(
    reader: SafetensorsReader, name: str, groups: np.ndarray, group: int
) -> np.ndarray | None:
    """int32 [in]: the inputs sorted by their groups; None where that changes nothing.

    Raises:
        CheckpointError: the groups are not all of one size.
    """
    count = len(groups) // group
    if groups.min() < 0 or groups.max() >= count or (np.bincount(groups) != group).any():
        raise CheckpointError(
            reader.path, f"it does not number {count} groups of {group} inputs each", name
        )
    order = np.argsort(groups, kind="stable").astype(np.int32)
    return None if (order == np.arange(len(order))).all() else order

"""FP8 checkpoints (quant_method "fp8"): matrices of e4m3 with one scale, one a row, or one a block.

A layer has weight e4m3 [out, in] and weight_scale_inv (of blocks of `weight_block_size` outputs and
inputs, or of all) or weight_scale (one, or one a row): what the elements are to be multiplied with,
whichever of the names it has. input_scale is that of activations.
"""

from __future__ import annotations

import math

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.awq import SCALE_TYPES, expect
from checkpoints.quantized.fields import Fields, is_listed
from checkpoints.quantized.quantized_matrix import FP8, Encoding, Matrix, check_finite
from checkpoints.quantized.rowwise import RowMatrix
from checkpoints.safetensors_reader import SafetensorsReader

PARTS = ("weight_scale_inv", "weight_scale", "input_scale")


def read_fp8(fields: Fields, reader: SafetensorsReader) -> dict[str, Matrix]:
    """The quantised matrices of an FP8 checkpoint.

    Raises:
        CheckpointError: an option that is not read, or tensors that contradict the config.
    """
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = block_size(fields, "weight_block_size")
    skipped = (*fields.names("modules_to_not_convert"), *fields.names("ignored_layers"))
    found: dict[str, Matrix] = {}
    for name, info in reader.tensors.items():
        module, _, part = name.rpartition(".")
        if info.dtype != FP8:
            continue
        if part != "weight" or len(info.shape) != 2 or is_listed(module, skipped):
            raise CheckpointError(reader.path, "nothing says how its e4m3 numbers are scaled", name)
        outputs, inputs = info.shape
        scale = f"{module}.weight_scale_inv"
        if scale not in reader.tensors:
            scale = f"{module}.weight_scale"
        static = static_scale(reader, module) if scheme == "static" else None
        found[name] = e4m3_matrix(reader, name, scale, (outputs, inputs), block, static)
    return found


def block_size(fields: Fields, name: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block that shares a scale; None without blocks."""
    block = fields.get(name)
    if block is None:
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size >= 16 and size % 16 == 0 for size in block)
    ):
        raise fields.error(name, block, "two multiples of 16: outputs and inputs")
    return block[0], block[1]


def e4m3_matrix(
    reader: SafetensorsReader,
    name: str,
    scale: str,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    static: float | None,
) -> RowMatrix:
    """A matrix of e4m3 with the scales of the tensor that `scale` names.

    `static` is the scale of its activations; None: each token has its own.

    Raises:
        CheckpointError: the scales are missing, are not finite, or are not as many as they should.
    """
    outputs, inputs = shape
    info = reader.tensors.get(scale)
    if info is None:
        raise CheckpointError(reader.path, "it is missing", scale)
    if block is not None:
        wanted: tuple[int, ...] = (-(-outputs // block[0]), -(-inputs // block[1]))
    elif math.prod(info.shape) == 1:
        wanted = info.shape
    else:
        wanted = (outputs,) if len(info.shape) == 1 else (outputs, 1)
    expect(reader, scale, wanted, SCALE_TYPES)
    check_finite(reader.path, scale, reader.read(scale))
    group = None if block is None else block[1]
    stored = Encoding("fp8", group, activations="fp8", static=static is not None)
    rows = 1 if block is None else block[0]
    return RowMatrix(reader, name, scale, shape, stored, block_rows=rows, input=static)


def static_scale(reader: SafetensorsReader, module: str) -> float:
    """The one scale of the activations of a layer.

    Raises:
        CheckpointError: it is missing, not one, or no positive number.
    """
    name = f"{module}.input_scale"
    info = reader.tensors.get(name)
    if info is None:
        raise CheckpointError(reader.path, "it is missing, though activations are static", name)
    expect(reader, name, info.shape if math.prod(info.shape) == 1 else (1,), SCALE_TYPES)
    scale = float(reader.read(name).astype(np.float32).reshape(()))
    if not 0 < scale < math.inf:
        raise CheckpointError(reader.path, f"{scale} is no scale", name)
    return scale

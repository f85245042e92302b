"""The quantised formats that are read: a newcomer is a file with its reader and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFReader, is_gguf
from checkpoints.json_file import read_object
from checkpoints.quantized import awq, compressed_tensors, fp8, gptq
from checkpoints.quantized.fields import Fields
from checkpoints.quantized.quantized_matrix import Matrix
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.safetensors_reader import ALL_DTYPES, SafetensorsReader

# configs of their own that tools wrote before config.json had a quantization_config
OLD_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True, slots=True)
class Format:
    """A way of storing quantised matrices in safetensors.

    Attributes:
        name: `quant_method` of quantization_config.
        read: (fields, reader) -> the matrices by the names of the weights that they stand for;
            judges shapes, types and scales of all, and raises CheckpointError.
        parts: last names of the tensors that matrices are made of; other tensors are the model's.
    """

    name: str
    read: Callable[[Fields, SafetensorsReader], Mapping[str, Matrix]]
    parts: tuple[str, ...]


FORMATS = (
    Format("awq", awq.read_awq, awq.PARTS),
    Format("gptq", gptq.read_gptq, gptq.PARTS),
    Format(
        "compressed-tensors",
        compressed_tensors.read_compressed_tensors,
        compressed_tensors.PARTS,
    ),
    Format("fp8", fp8.read_fp8, fp8.PARTS),
)


def quantization_of(path: str | Path) -> tuple[str, Fields] | None:
    """Name of a checkpoint's format and its quantization_config; None: it is not quantised.

    Args:
        path: model folder, or a GGUF file; its own tensors say how they are stored.

    Raises:
        CheckpointError: a config that is no JSON object, or of a method that is not read.
    """
    path = Path(path)
    if is_gguf(path):
        return "gguf", Fields(path, {})
    values = (read_object(path / "config.json") or {}).get("quantization_config")
    if values is None:
        for name, method in OLD_CONFIGS.items():
            old = read_object(path / name)
            if old:
                values = {"quant_method": method, **old}
                break
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise CheckpointError(path, f"quantization_config={values!r} is no JSON object")
    fields = Fields(path, values)
    method = fields.get("quant_method")
    if method is None and "config_groups" in values:
        method = "compressed-tensors"
    if method not in [format.name for format in FORMATS]:
        allowed = f"one of {', '.join(format.name for format in FORMATS)}"
        raise fields.error("quant_method", method, allowed)
    return str(method), fields


def open_checkpoint(path: str | Path) -> QuantizedReader | GGUFReader:
    """Opens a model folder or a GGUF file, reads its headers and judges what is quantised.

    Raises:
        CheckpointError: a file is missing or damaged, a scheme is not read, or tensors contradict
            the quantization_config; nothing is kept.
    """
    path = Path(path)
    if is_gguf(path):
        return GGUFReader(path)
    found = quantization_of(path)
    if found is None:
        return QuantizedReader(SafetensorsReader(path), "", {}, set())
    name, fields = found
    format = next(format for format in FORMATS if format.name == name)
    reader = SafetensorsReader(path, ALL_DTYPES)
    try:
        matrices = format.read(fields, reader)
        if not matrices:
            raise CheckpointError(path, f"quantization_config says {name}, but no tensor is")
        parts = set()
        for weight in matrices:
            module = weight.rpartition(".")[0]
            parts |= {f"{module}.{part}" for part in format.parts}
        return QuantizedReader(reader, name, matrices, parts)
    except BaseException:
        reader.close()
        raise

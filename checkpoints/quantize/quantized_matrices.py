"""Matrices that are quantised already, as a Hugging Face checkpoint: its method, tensors, config.

AWQ and GPTQ have one scheme for all layers. What they do not have goes to compressed-tensors, which
names a scheme a group of layers and has zeros, orders of inputs and blocks too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.quantize.rounding import RoundedMatrix
from checkpoints.quantize.schemes import SCHEMES, quantization_config
from checkpoints.quantize.tensors import awq_tensors, gptq_tensors, packed
from checkpoints.quantized import Encoding

COMPRESSED = "compressed-tensors"
BLOCK_ROWS = (128, 64, 32, 16)  # rows of e4m3 that may share a scale
FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32)))


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """The form in which a matrix is written.

    Attributes:
        stored: kind, group, zeros ("none" or "integer"), order and activations.
        shape: [out, in].
    """

    stored: Encoding
    shape: tuple[int, int]

    @property
    def bits(self) -> int:
        return 4 if self.stored.kind == "int4" else 8

    @property
    def rounds_rows(self) -> bool:
        """Whether its activations are 8-bit integers with a scale a token."""
        stored = self.stored
        plain = stored.group is None and stored.zeros == "none" and not stored.static
        return stored.kind == "int8" and plain and stored.activations == "int8"

    @property
    def is_packed(self) -> bool:
        """Whether compressed-tensors packs it: integers that floats are multiplied with."""
        return self.stored.kind != "fp8" and not self.rounds_rows and not self._is_static8

    @property
    def _is_static8(self) -> bool:
        return self.stored.kind == "int8" and self.stored.static and not self.stored.ordered


@dataclass(frozen=True, slots=True)
class MatrixTensors:
    """The tensors of a matrix by the last parts of their names, and its scheme's description."""

    tensors: dict[str, np.ndarray]
    group: dict[str, Any]


def method_of(matrices: Collection[KeptMatrix], source: str | None) -> str:
    """The quant_method that has all the matrices: `source`, that of the checkpoint that they were
    read from, where it has; else compressed-tensors."""
    kinds = {(m.stored.kind, m.stored.group, m.stored.static) for m in matrices}
    if source not in ("awq", "gptq") or len(kinds) != 1:
        return COMPRESSED
    ((kind, _, static),) = kinds
    if kind == "fp8" or static or any(m.rounds_rows for m in matrices):
        return COMPRESSED
    count = 8 if kind == "int4" else 4  # of elements in a word
    if source == "awq":
        fits = kind == "int4" and not any(m.stored.ordered for m in matrices)
        return "awq" if fits and not any(m.shape[0] % count for m in matrices) else COMPRESSED
    return "gptq" if not any(n % count for m in matrices for n in m.shape) else COMPRESSED


def written(
    method: str,
    matrix: KeptMatrix,
    rounded: RoundedMatrix,
    floats: np.dtype,
    input_scale: float | None,
) -> MatrixTensors:
    """The tensors of one matrix.

    Args:
        method: from `method_of`.
        matrix: what it is.
        rounded: its numbers; 4-bit elements and zeros unsigned, 8-bit ones signed.
        floats: the model's type, which scales have too where it holds them exactly.
        input_scale: of its activations, where they are static.
    """
    # readers of AWQ and GPTQ may take float16 alone
    types = FLOATS if method != COMPRESSED else (floats, *FLOATS)
    floats = next(kind for kind in types if _holds(kind, rounded.scales))
    if method != COMPRESSED:
        zeros = rounded.zeros
        if zeros is None:
            middle = 8 if matrix.bits == 4 else 0
            zeros = np.full(rounded.scales.shape, middle, np.int16)
        unsigned = rounded._replace(
            elements=_unsigned(rounded.elements, matrix.bits),
            zeros=_unsigned(zeros, matrix.bits),
        )
        if method == "awq":
            return MatrixTensors(awq_tensors(unsigned, floats), {})
        return MatrixTensors(gptq_tensors(unsigned, floats, matrix.bits), {})
    own: dict[str, np.ndarray] = {}
    scales, block = rounded.scales, None
    if matrix.is_packed:
        own["weight_packed"] = packed(_unsigned(rounded.elements, matrix.bits), matrix.bits)
        own["weight_shape"] = np.array(matrix.shape, np.int64)
        if rounded.order is not None and matrix.stored.group is not None:
            group_of = np.empty(matrix.shape[1], np.int32)
            group_of[rounded.order] = np.arange(matrix.shape[1]) // matrix.stored.group
            own["weight_g_idx"] = group_of
    else:
        own["weight"] = rounded.elements
    if rounded.zeros is not None and matrix.is_packed:
        words = packed(_unsigned(rounded.zeros, matrix.bits).T, matrix.bits)
        own["weight_zero_point"] = np.ascontiguousarray(words.T)
    elif rounded.zeros is not None:
        own["weight_zero_point"] = rounded.zeros.astype(np.int8)
    if matrix.stored.kind == "fp8" and matrix.stored.group is not None:
        rows = _block_rows(scales)
        scales, block = scales[::rows], [rows, matrix.stored.group]
    own["weight_scale"] = np.ascontiguousarray(scales).astype(floats)
    if input_scale is not None:
        own["input_scale"] = np.array([input_scale], np.float32)
    return MatrixTensors(own, _group(matrix, block))


def config_of(
    method: str,
    matrices: Mapping[str, KeptMatrix],
    groups: Mapping[str, dict[str, Any]],
    kept: Sequence[str],
) -> dict[str, Any]:
    """The quantization_config of config.json.

    Args:
        method: from `method_of`.
        matrices: by the names of their modules.
        groups: `Written.group` of each.
        kept: names of the linear modules that are not quantised.
    """
    first = next(iter(matrices.values()))
    if method != COMPRESSED:
        schemes = dict.fromkeys(matrices, SCHEMES[f"int4-{method}"])
        found = quantization_config(schemes, kept, first.stored.group or -1)
        if method == "gptq":
            found["bits"] = first.bits
            found["sym"] = all(m.stored.zeros == "none" for m in matrices.values())
            found["desc_act"] = any(m.stored.ordered for m in matrices.values())
            found["lm_head"] = "lm_head" in matrices
        return found
    by_scheme: list[tuple[dict[str, Any], list[str]]] = []
    for module, group in groups.items():
        same = next((names for known, names in by_scheme if known == group), None)
        if same is None:
            by_scheme.append((group, [module]))
        else:
            same.append(module)
    alone = len(by_scheme) == 1
    formats = {group["format"] for group, _ in by_scheme}
    return {
        "quant_method": COMPRESSED,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"] if alone else names} | group
            for number, (group, names) in enumerate(by_scheme)
        },
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def _group(matrix: KeptMatrix, block: list[int] | None) -> dict[str, Any]:
    """The fields of a group of `config_groups` beside its targets."""
    stored = matrix.stored
    kind = "float" if stored.kind == "fp8" else "int"
    strategy = "block" if block else "channel" if stored.group is None else "group"
    weights: dict[str, Any] = {
        "num_bits": matrix.bits,
        "type": kind,
        "symmetric": stored.zeros == "none",
        "strategy": strategy,
        "group_size": stored.group if strategy == "group" else None,
        "dynamic": False,
    }
    if block:
        weights["block_structure"] = block
    if stored.ordered:
        weights["actorder"] = "group"
    activations = None
    if stored.static or matrix.rounds_rows or kind == "float":
        activations = {
            "num_bits": 8,
            "type": "float" if kind == "float" or stored.activations == "fp8" else "int",
            "symmetric": True,
            "strategy": "tensor" if stored.static else "token",
            "dynamic": not stored.static,
        }
    unpacked = "float-quantized" if kind == "float" else "int-quantized"
    return {
        "format": "pack-quantized" if matrix.is_packed else unpacked,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def _holds(kind: np.dtype, scales: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool((scales.astype(kind).astype(np.float32) == scales).all())


def _unsigned(integers: np.ndarray, bits: int) -> np.ndarray:
    """Signed integers of 8 bits plus 128; those of 4 bits are unsigned as they come."""
    if bits == 4:
        return integers.astype(np.uint8)
    return (integers.astype(np.int16) + 128).astype(np.uint8)


def _block_rows(scales: np.ndarray) -> int:
    """The rows of blocks that all have one scale a group of inputs."""
    for rows in BLOCK_ROWS:
        blocks = scales[::rows].repeat(rows, axis=0)[: len(scales)]
        if (blocks == scales).all():
            return rows
    raise ValueError("scales of e4m3 that differ within 16 rows")

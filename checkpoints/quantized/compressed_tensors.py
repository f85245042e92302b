"""compressed-tensors checkpoints (of llm-compressor): schemes by groups of layers.

`config_groups` names, for each group, its targets (classes such as "Linear", module names, or
expressions after "re:") and how their weights and input activations are quantised; `ignore` names
modules that are not. Read are:

* pack-quantized: integers of 4 or 8 bits, weight_packed int32 [out, in * bits / 32], weight_scale
  [out, groups], weight_shape, weight_zero_point int32 [out * bits / 32, groups], weight_g_idx;
* int-quantized: weight int8 [out, in], weight_scale [out, 1] or [out, groups], weight_zero_point;
* float-quantized: weight e4m3 [out, in], weight_scale [1], [out, 1] or of blocks;
* naive-quantized: either of the latter two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.awq import SCALE_TYPES, check_divides, expect
from checkpoints.quantized.fields import Fields, is_listed
from checkpoints.quantized.fp8 import block_size, e4m3_matrix, static_scale
from checkpoints.quantized.gptq import group_order
from checkpoints.quantized.quantized_matrix import Encoding, Matrix, check_finite
from checkpoints.quantized.rowwise import RowMatrix
from checkpoints.safetensors_reader import SafetensorsReader

PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
)
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class Scheme:
    """The stored form of a group of layers.

    Attributes:
        format: one of `FORMATS`.
        bits: 4 or 8.
        is_float: e4m3 instead of integers.
        group: inputs that share a scale; None: all of a row.
        block: outputs and inputs that share one.
        symmetric: without zeros.
        activations: "float", "int8" or "fp8".
        static: whether they are rounded with one scale of the file.
    """

    format: str
    bits: int
    is_float: bool
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool
    activations: str
    static: bool


def read_compressed_tensors(fields: Fields, reader: SafetensorsReader) -> dict[str, Matrix]:
    """The quantised matrices of a compressed-tensors checkpoint.

    Raises:
        CheckpointError: a scheme that is not read, or tensors that contradict the config.
    """
    sparsity = fields.get("sparsity_config", {})
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise fields.error("sparsity_config", sparsity, "none, or of format dense")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups", groups, "an object that names at least one group")
    schemes = [_scheme(fields, name, group) for name, group in groups.items()]
    ignored = fields.names("ignore")
    found: dict[str, Matrix] = {}
    for name in reader.tensors:
        module, _, part = name.rpartition(".")
        if part not in ("weight_packed", "weight_scale"):
            continue
        weight = f"{module}.weight"
        if weight in found:
            continue
        if is_listed(module, ignored):
            raise CheckpointError(reader.path, "quantization_config.ignore names its module", name)
        scheme = next((s for targets, s in schemes if _is_target(module, targets)), None)
        if scheme is None:
            raise CheckpointError(reader.path, "no group of config_groups has it as a target", name)
        found[weight] = _matrix(reader, module, scheme)
        _check_zeros(reader, module, scheme)
    return found


def _scheme(fields: Fields, name: str, group: object) -> tuple[Sequence[str], Scheme]:
    prefix = f"{fields.prefix}.config_groups.{name}"
    if not isinstance(group, Mapping):
        raise fields.error(f"config_groups.{name}", group, "an object")
    own = Fields(fields.path, group, prefix)
    targets = own.names("targets")
    weights = own.get("weights")
    if not isinstance(weights, Mapping):
        raise own.error("weights", weights, "an object")
    if own.get("output_activations"):
        raise own.error("output_activations", own.get("output_activations"), "null")
    kind = Fields(fields.path, weights, f"{prefix}.weights")
    bits = kind.one_of("num_bits", (4, 8))
    is_float = kind.one_of("type", ("int", "float"), "int") == "float"
    if is_float and bits != 8:
        raise kind.error("num_bits", bits, "8 where type is float")
    strategy = kind.one_of("strategy", STRATEGIES, "tensor")
    size = kind.group() if strategy == "group" else None
    if strategy == "block" and not is_float:
        raise kind.error("strategy", strategy, "tensor, channel or group where type is int")
    if strategy == "group" and (is_float or size is None):
        raise kind.error("group_size", size, "a size, where type is int")
    activations, static = _activations(own, prefix)
    formats = Fields(fields.path, {"format": own.get("format", fields.get("format"))}, prefix)
    return targets, Scheme(
        format=formats.one_of("format", FORMATS, "dense"),
        bits=bits,
        is_float=is_float,
        group=size,
        block=block_size(kind, "block_structure") if strategy == "block" else None,
        symmetric=kind.flag("symmetric", True),
        activations=activations,
        static=static,
    )


def _activations(group: Fields, prefix: str) -> tuple[str, bool]:
    """The type that activations are rounded to ("float": none), and whether with one scale."""
    values = group.get("input_activations")
    if values is None:
        return "float", False
    if not isinstance(values, Mapping):
        raise group.error("input_activations", values, "an object or null")
    fields = Fields(group.path, values, f"{prefix}.input_activations")
    fields.one_of("num_bits", (8,))
    kind = "fp8" if fields.one_of("type", ("int", "float"), "int") == "float" else "int8"
    static = not fields.get("dynamic", False)
    if static:
        fields.one_of("strategy", ("tensor",), "tensor")
        if not fields.flag("symmetric", True):
            raise fields.error("symmetric", False, "true where dynamic is false")
    return kind, static


def _is_target(module: str, targets: Sequence[str]) -> bool:
    for target in targets:
        if target.startswith("re:"):
            if re.match(target[3:], module):
                return True
        elif target == "Linear" or target == module or module.endswith(f".{target}"):
            return True
    return False


def _matrix(reader: SafetensorsReader, module: str, scheme: Scheme) -> Matrix:
    weight = f"{module}.weight"
    packed = f"{module}.weight_packed" in reader.tensors
    if packed != (scheme.format == "pack-quantized"):
        name = f"{module}.weight_packed" if packed else weight
        raise CheckpointError(reader.path, f"format {scheme.format} does not store it", name)
    if packed:
        return _packed(reader, module, scheme)
    info = reader.tensors.get(weight)
    if info is None:
        raise CheckpointError(reader.path, "it is missing", weight)
    if len(info.shape) != 2:
        raise CheckpointError(reader.path, f"shape {list(info.shape)} of a matrix", weight)
    shape = (info.shape[0], info.shape[1])
    if scheme.is_float:
        expect(reader, weight, shape, ("float8_e4m3fn",))
        static = static_scale(reader, module) if scheme.static else None
        scales = f"{module}.weight_scale"
        return e4m3_matrix(reader, weight, scales, shape, scheme.block, static)
    expect(reader, weight, shape, ("int8",))
    if scheme.bits != 8:
        raise CheckpointError(reader.path, f"{scheme.bits} bits that are not packed", weight)
    return _integers(reader, module, weight, shape, scheme, None, None)


def _check_zeros(reader: SafetensorsReader, module: str, scheme: Scheme) -> None:
    """Refuse zero points that nothing reads and that are not 0."""
    unread = ["input_zero_point"]
    if scheme.symmetric or scheme.is_float:
        unread.append("weight_zero_point")
    for name in (f"{module}.{part}" for part in unread):
        if name in reader.tensors and reader.read(name).astype(np.float32).any():
            raise CheckpointError(reader.path, "zero points, and the scheme is symmetric", name)


def _packed(reader: SafetensorsReader, module: str, scheme: Scheme) -> Matrix:
    if scheme.is_float:
        raise CheckpointError(reader.path, "floats that are packed", f"{module}.weight_packed")
    name = f"{module}.weight_shape"
    if name not in reader.tensors:
        raise CheckpointError(reader.path, "it is missing", name)
    sizes = reader.read(name).astype(np.int64).reshape(-1)
    if sizes.size != 2 or (sizes < 1).any():
        raise CheckpointError(reader.path, f"{sizes.tolist()} is no shape of a matrix", name)
    outputs, inputs = int(sizes[0]), int(sizes[1])
    per_word = 32 // scheme.bits
    weight = f"{module}.weight_packed"
    expect(reader, weight, (outputs, -(-inputs // per_word)), ("int32",))
    order = None
    g_idx = f"{module}.weight_g_idx"
    if g_idx in reader.tensors and scheme.group is not None:
        expect(reader, g_idx, (inputs,), ("int32", "int64"))
        order = group_order(reader, g_idx, reader.read(g_idx), scheme.group)
    return _integers(reader, module, weight, (outputs, inputs), scheme, scheme.bits, order)


def _integers(
    reader: SafetensorsReader,
    module: str,
    weight: str,
    shape: tuple[int, int],
    scheme: Scheme,
    bits: int | None,
    order: np.ndarray | None,
) -> RowMatrix:
    outputs, inputs = shape
    check_divides(reader, weight, scheme.group, inputs)
    zero = None if scheme.symmetric else f"{module}.weight_zero_point"
    stored = Encoding(
        "int4" if bits == 4 else "int8",
        scheme.group,
        "none" if scheme.symmetric else "integer",
        scheme.activations,
        ordered=order is not None,
        static=scheme.static,
    )
    groups = stored.groups(inputs)
    scale = f"{module}.weight_scale"
    info = reader.tensors.get(scale)
    single = info is not None and info.shape in ((), (1,), (1, 1)) and scheme.group is None
    expect(reader, scale, info.shape if info and single else (outputs, groups), SCALE_TYPES)
    stored = replace(stored, scales=reader.tensors[scale].dtype.name)
    check_finite(reader.path, scale, reader.read(scale))
    if zero is not None and bits is not None:
        expect(reader, zero, (-(-outputs * bits // 32), groups), ("int32",))
    elif zero is not None:
        expect(reader, zero, (outputs, groups), ("int8",))
    return RowMatrix(
        reader,
        weight,
        scale,
        shape,
        stored,
        zero=zero,
        packed_bits=bits,
        sorted=order,
        input=static_scale(reader, module) if scheme.static else None,
    )

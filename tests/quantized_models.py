"""Tiny quantised checkpoints, made with NumPy from each format's public definition.

A packer rounds a matrix [out, in] to random scales and zeros, and returns the tensors of its format
and the float32 matrix that they stand for. `quantize_folder` does so with the linear layers of a
model and writes two folders: the quantised checkpoint, and the floats to compare it with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "model.safetensors"
FP8 = ml_dtypes.float8_e4m3fn
INPUT_SCALE = 0.01  # of static activations: numbers above 1.27 are cut off in 8-bit integers
Tensors = dict[str, np.ndarray]
# (weight float32 [out, in], random numbers) -> (tensors by their last names, float32 [out, in])
Packer = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]


def groups_of(weight: np.ndarray, group: int | None) -> np.ndarray:
    """[out, groups, group]."""
    return weight.reshape(len(weight), -1, group or weight.shape[1])


def integers(
    weight: np.ndarray, bits: int, group: int | None, asymmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned integers [out, in], float16 scales and zeros [out, groups]."""
    grouped, top = groups_of(weight, group), (1 << bits) - 1
    if asymmetric:
        low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 1, top)
    else:
        scale = (np.abs(grouped).max(2) / (top // 2)).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1))
    steps = np.rint(grouped / scale.astype(np.float32)[..., None]) + zero[..., None]
    return np.clip(steps, 0, top).reshape(weight.shape).astype(np.int64), scale, zero.astype(int)


def values_of(
    quantized: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: int | None
) -> np.ndarray:
    """(integer - zero) * scale."""
    grouped = groups_of(quantized, group) - zero[..., None]
    wide = grouped.astype(np.float32) * scale.astype(np.float32)[..., None]
    return wide.reshape(quantized.shape)


def packed(fields: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[R, C] unsigned fields -> int32 words [R, C * bits / 32], the lowest bits first."""
    count = 32 // bits
    columns = fields.reshape(len(fields), -1, count)
    word = np.zeros(columns.shape[:2], np.uint64)
    for place in range(count):
        column = place if order is None else order[place]
        word |= columns[:, :, column].astype(np.uint64) << np.uint64(bits * place)
    return np.ascontiguousarray(word.astype(np.uint32).view(np.int32))


def awq(group: int | None = 64) -> Packer:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        q, scale, zero = integers(weight, 4, group, asymmetric=True)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": packed(q.T, 4, order),
            "qzeros": packed(zero.T, 4, order),
            "scales": np.ascontiguousarray(scale.T),
        }
        return tensors, values_of(q, scale, zero, group)

    return pack


def gptq(
    bits: int = 4,
    group: int | None = 64,
    asymmetric: bool = True,
    act_order: bool = False,
    version: int = 1,
    order_seed: int | None = 3,
) -> Packer:
    """`order_seed` of the act-order; None draws another for each matrix."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        inputs = weight.shape[1]
        g_idx = np.arange(inputs) // (group or inputs)
        if act_order:
            g_idx = (rng if order_seed is None else np.random.default_rng(order_seed)).permutation(
                g_idx
            )
        sorted_inputs = np.argsort(g_idx, kind="stable")
        q, scale, zero = integers(weight[:, sorted_inputs], bits, group, asymmetric)
        unsorted = np.argsort(sorted_inputs)
        stored_zero = (zero - (1 if version == 1 else 0)) & ((1 << bits) - 1)
        tensors = {
            "qweight": np.ascontiguousarray(packed(q[:, unsorted], bits).T),
            "qzeros": packed(stored_zero.T, bits),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": g_idx.astype(np.int32),
        }
        return tensors, values_of(q, scale, zero, group)[:, unsorted]

    return pack


def ct_packed(bits: int = 4, group: int | None = 64, asymmetric: bool = False) -> Packer:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        q, scale, zero = integers(weight, bits, group, asymmetric)
        tensors = {
            "weight_packed": packed(q, bits),
            "weight_scale": scale,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if asymmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(packed(zero.T, bits).T)
        return tensors, values_of(q, scale, zero, group)

    return pack


def ct_int8(group: int | None = None, asymmetric: bool = False) -> Packer:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        q, scale, zero = integers(weight, 8, group, asymmetric)
        tensors = {"weight": (q - 128).astype(np.int8), "weight_scale": scale.astype(np.float32)}
        if asymmetric:
            tensors["weight_zero_point"] = (zero - 128).astype(np.int8)
        return tensors, values_of(q, scale, zero, group)

    return pack


def fp8(
    scale_name: str = "weight_scale", block: tuple[int, int] | None = None, by_row: bool = True
) -> Packer:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        outputs, inputs = weight.shape
        rows, columns = block or ((1, inputs) if by_row else (outputs, inputs))
        down, across = -(-outputs // rows), -(-inputs // columns)
        padded = np.zeros((down * rows, across * columns), np.float32)
        padded[:outputs, :inputs] = weight
        blocks = padded.reshape(down, rows, across, columns)
        scale = (np.abs(blocks).max(axis=(1, 3)) / 448).astype(np.float32)
        wide = np.repeat(np.repeat(scale, rows, 0), columns, 1)[:outputs, :inputs]
        stored = np.clip(weight / wide, -448, 448).astype(FP8)
        shape = scale.reshape(()) if block is None and not by_row else scale
        tensors = {"weight": stored, scale_name: shape.copy()}
        return tensors, stored.astype(np.float32) * wide

    return pack


def static(pack: Packer) -> Packer:
    """With the scale of activations that are rounded with one."""

    def packed_too(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        tensors, values = pack(weight, rng)
        return tensors | {"input_scale": np.array([INPUT_SCALE], np.float32)}, values

    return packed_too


def quantize_folder(
    model: Path,
    folder: Path,
    config: Mapping[str, Any],
    packer: Callable[[str], Packer | None],
    more: Callable[[str], Tensors] = lambda module: {},
) -> tuple[Path, Path]:
    """A quantised copy of a float32 model, and the floats that it stands for.

    Args:
        model: folder of the floats.
        folder: where to; both are made below it.
        config: `quantization_config`.
        packer: of a linear layer by the name of its module; None leaves it as it is.
        more: further tensors of a quantised module, by their last names.
    """
    stored, floats = folder / "quantized", folder / "floats"
    for copy in (stored, floats):
        shutil.copytree(model, copy)
    tensors, rng = load_file(model / FILE), np.random.default_rng(1)
    quantized, dequantized = {}, {}
    for name, value in tensors.items():
        module, _, kind = name.rpartition(".")
        pack = packer(module) if kind == "weight" and module.endswith("_proj") else None
        if pack is None:
            quantized[name] = dequantized[name] = value
            continue
        parts, dequantized[name] = pack(value, rng)
        parts |= more(module)
        quantized |= {f"{module}.{part}": array for part, array in parts.items()}
    for tensors, file in ((quantized, stored / FILE), (dequantized, floats / FILE)):
        # the library writes an array's memory in whatever order it is
        whole = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
        save_file(whole, file, {"format": "pt"})
    file = stored / "config.json"
    values = json.loads(file.read_text()) | {"quantization_config": dict(config)}
    file.write_text(json.dumps(values))
    return stored, floats


def _compressed(
    format: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _weights(strategy: str, bits: int = 8, kind: str = "int", **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more


def _gptq(**more: Any) -> dict[str, Any]:
    values = {"bits": 4, "group_size": 64, "sym": False, "desc_act": False}
    return {"quant_method": "gptq"} | values | more


def _awq(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}


_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_TOKEN_FP8 = _TOKEN | {"type": "float"}
_STATIC = _TOKEN | {"strategy": "tensor", "dynamic": False}
_GROUPS = {"group_size": 64}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
# name -> (quantization_config, packer)
CASES: dict[str, tuple[dict[str, Any], Packer]] = {
    "awq": (_awq(64), awq(64)),
    "awq-32": (_awq(32), awq(32)),
    "awq-128": (_awq(128), awq(128)),
    "awq-rows": (_awq(-1), awq(None)),
    "gptq": (_gptq(), gptq()),
    "gptq-symmetric": (_gptq(sym=True, group_size=128), gptq(group=128, asymmetric=False)),
    "gptq-v2": (
        _gptq(checkpoint_format="gptq_v2", dynamic={r"-:^lm_head$": {}}),  # is left out
        gptq(version=2),
    ),
    "gptq-act-order": (_gptq(desc_act=True), gptq(act_order=True)),
    "gptq-orders": (_gptq(desc_act=True), gptq(act_order=True, order_seed=None)),
    "gptq-8": (_gptq(bits=8), gptq(bits=8)),
    "w4a16": (_compressed("pack-quantized", _weights("group", 4, **_GROUPS)), ct_packed()),
    "w4a16-zeros": (
        _compressed("pack-quantized", _weights("group", 4, **_GROUPS) | {"symmetric": False}),
        ct_packed(asymmetric=True),
    ),
    "w4a16-rows": (_compressed("pack-quantized", _weights("channel", 4)), ct_packed(group=None)),
    "w8a16": (_compressed("pack-quantized", _weights("channel")), ct_packed(8, None)),
    "w8a16-groups": (_compressed("pack-quantized", _weights("group", **_GROUPS)), ct_packed(8)),
    "w8a8": (
        _compressed("int-quantized", _weights("channel"), _TOKEN),
        ct_int8(),
    ),
    "w8a8-zeros": (
        _compressed("int-quantized", _weights("channel") | {"symmetric": False}, _TOKEN),
        ct_int8(asymmetric=True),
    ),
    "fp8-rows": (
        _compressed(
            "float-quantized", _weights("channel", kind="float"), _TOKEN | {"type": "float"}
        ),
        fp8(),
    ),
    "fp8-static": (
        _compressed(
            "float-quantized",
            _weights("tensor", kind="float"),
            _STATIC | {"type": "float"},
        ),
        static(fp8(by_row=False)),
    ),
    "fp8-tensor-static": (_FP8 | {"activation_scheme": "static"}, static(fp8(by_row=False))),
    "w8a8-static": (
        _compressed("int-quantized", _weights("channel"), _STATIC),
        static(ct_int8()),
    ),
    "w8a8-static-zeros": (
        _compressed("int-quantized", _weights("channel") | {"symmetric": False}, _STATIC),
        static(ct_int8(asymmetric=True)),
    ),
    "fp8-tensor": (_FP8, fp8(by_row=False)),
    "fp8-block": (_FP8 | {"weight_block_size": [32, 64]}, fp8("weight_scale_inv", (32, 64))),
}

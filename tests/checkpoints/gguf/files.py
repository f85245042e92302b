"""Writes GGUF files, from the public definition of the container and of its blocks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
# matrix float32 [rows, in] -> (bytes, the numbers that they stand for)
Packed = tuple[bytes, np.ndarray]


def f32(matrix: np.ndarray) -> Packed:
    return matrix.astype("<f4").tobytes(), matrix.astype(np.float32)


def f16(matrix: np.ndarray) -> Packed:
    half = matrix.astype("<f2")
    return half.tobytes(), half.astype(np.float32)


def q8_0(matrix: np.ndarray) -> Packed:
    out, values = [], []
    for block in matrix.reshape(-1, 32):
        d = np.float16(np.abs(block).max() / 127)
        q = np.clip(np.rint(block / np.float32(d)), -127, 127).astype(np.int8)
        out.append(d.tobytes() + q.tobytes())
        values.append(np.float32(d) * q)
    return b"".join(out), np.array(values, np.float32).reshape(matrix.shape)


def q4_0(matrix: np.ndarray) -> Packed:
    out, values = [], []
    for block in matrix.reshape(-1, 32):
        d = np.float16(block[np.abs(block).argmax()] / -8)
        q = np.clip(np.rint(block / np.float32(d)) + 8, 0, 15).astype(np.uint8)
        out.append(d.tobytes() + bytes(int(q[j]) | int(q[j + 16]) << 4 for j in range(16)))
        values.append(np.float32(d) * (q.astype(np.float32) - 8))
    return b"".join(out), np.array(values, np.float32).reshape(matrix.shape)


def _k_block(block: np.ndarray, top: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Header of a Q4_K or Q5_K block of 256, its integers [8, 32], and their values."""
    groups = block.reshape(8, 32)
    low = np.minimum(groups.min(1), 0)
    wide_scale, wide_min = (groups.max(1) - low) / top, -low
    d, dmin = np.float16(wide_scale.max() / 63), np.float16(wide_min.max() / 63)
    scale = np.clip(np.rint(wide_scale / np.float32(d)), 1, 63).astype(int)
    minimum = np.clip(np.rint(wide_min / np.float32(dmin)), 0, 63).astype(int)
    steps, offsets = np.float32(d) * scale, np.float32(dmin) * minimum
    q = np.clip(np.rint((groups + offsets[:, None]) / steps[:, None]), 0, top).astype(int)
    packed = bytearray(12)
    for j in range(4):
        packed[j] = scale[j] | scale[j + 4] >> 4 << 6
        packed[j + 4] = minimum[j] | minimum[j + 4] >> 4 << 6
        packed[j + 8] = (scale[j + 4] & 15) | (minimum[j + 4] & 15) << 4
    return d.tobytes() + dmin.tobytes() + bytes(packed), q, steps[:, None] * q - offsets[:, None]


def q4_k(matrix: np.ndarray) -> Packed:
    out, values = [], []
    for block in matrix.reshape(-1, 256):
        header, q, value = _k_block(block, 15)
        pairs = [q[2 * c] | q[2 * c + 1] << 4 for c in range(4)]
        out.append(header + np.concatenate(pairs).astype(np.uint8).tobytes())
        values.append(value)
    return b"".join(out), np.array(values, np.float32).reshape(matrix.shape)


def q5_k(matrix: np.ndarray) -> Packed:
    out, values = [], []
    for block in matrix.reshape(-1, 256):
        header, q, value = _k_block(block, 31)
        high = sum((q[g] >> 4) << g for g in range(8))
        pairs = [(q[2 * c] & 15) | (q[2 * c + 1] & 15) << 4 for c in range(4)]
        low = np.concatenate(pairs).astype(np.uint8).tobytes()
        out.append(header + np.asarray(high).astype(np.uint8).tobytes() + low)
        values.append(value)
    return b"".join(out), np.array(values, np.float32).reshape(matrix.shape)


def q6_k(matrix: np.ndarray) -> Packed:
    out, values = [], []
    for block in matrix.reshape(-1, 256):
        groups = block.reshape(16, 16)
        wide = np.abs(groups).max(1) / 31
        d = np.float16(wide.max() / 127)
        scale = np.clip(np.rint(wide / np.float32(d)), 1, 127).astype(np.int8)
        steps = np.float32(d) * scale.astype(np.float32)
        q = np.clip(np.rint(groups / steps[:, None]), -32, 31).astype(int)
        values.append(steps[:, None] * q)
        unsigned = (q + 32).reshape(2, 128)
        low, high = bytearray(128), bytearray(64)
        for half in range(2):
            for i in range(32):
                a, b, c, e = (int(unsigned[half, i + 32 * part]) for part in range(4))
                low[64 * half + i] = (a & 15) | (c & 15) << 4
                low[64 * half + i + 32] = (b & 15) | (e & 15) << 4
                high[32 * half + i] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6
        out.append(bytes(low) + bytes(high) + scale.tobytes() + d.tobytes())
    return b"".join(out), np.array(values, np.float32).reshape(matrix.shape)


def recorded_blocks(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of a type, and what gguf's own dequantiser made of them (`record.py`)."""
    with np.load(Path(__file__).with_name("dequantized.npz")) as arrays:
        return arrays[f"{kind}.blocks"], arrays[f"{kind}.values"]


def recorded(kind: str) -> Callable[[np.ndarray], Packed]:
    """A packer that puts recorded blocks where the matrix has some, whatever its numbers are."""

    def pack(matrix: np.ndarray) -> Packed:
        blocks, values = recorded_blocks(kind)
        rng = np.random.default_rng(matrix.size)
        chosen = rng.integers(0, len(blocks), matrix.size // values.shape[1])
        return blocks[chosen].tobytes(), values[chosen].reshape(matrix.shape)

    return pack


# ggml's numbers of the types
TYPES: dict[str, tuple[int, Callable[[np.ndarray], Packed]]] = {
    "F32": (0, f32),
    "F16": (1, f16),
    "Q4_0": (2, q4_0),
    "Q4_1": (3, recorded("Q4_1")),
    "Q5_0": (6, recorded("Q5_0")),
    "Q5_1": (7, recorded("Q5_1")),
    "Q8_0": (8, q8_0),
    "Q2_K": (10, recorded("Q2_K")),
    "Q3_K": (11, recorded("Q3_K")),
    "Q4_K": (12, q4_k),
    "Q5_K": (13, q5_k),
    "Q6_K": (14, q6_k),
    "IQ4_NL": (20, recorded("IQ4_NL")),
    "IQ4_XS": (23, recorded("IQ4_XS")),
}


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kind = {str: 8, int: 5, float: 6}[type(value[0])]
    items = [_text(x) if kind == 8 else struct.pack("<i" if kind == 5 else "<f", x) for x in value]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Writes a file of tensors (type, matrix); returns the numbers that it stands for."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    data, values = b"", {}
    for name, (kind, matrix) in tensors.items():
        number, pack = TYPES[kind]
        raw, values[name] = pack(matrix)
        header += _text(name) + struct.pack("<I", matrix.ndim)
        header += struct.pack(f"<{matrix.ndim}Q", *reversed(matrix.shape))
        header += struct.pack("<IQ", number, len(data))
        data += raw + bytes(-len(raw) % ALIGNMENT)
    path.write_bytes(header + bytes(-len(header) % ALIGNMENT) + data)
    return values


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The name that llama.cpp's converter gives a tensor of a Hugging Face checkpoint."""
    module, _, kind = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"


EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def gguf_place(name: str) -> tuple[str, int | None]:
    """The name of the tensor, and which of its matrices, where the converter stacks experts."""
    parts = name.split(".")
    if "experts" in parts:
        return f"blk.{parts[2]}.{EXPERT_NAMES[parts[-2]]}.weight", int(parts[-3])
    if parts[-2] == "gate":
        return f"blk.{parts[2]}.ffn_gate_inp.weight", None
    return gguf_name(name), None


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as the converter orders them for "llama"."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)

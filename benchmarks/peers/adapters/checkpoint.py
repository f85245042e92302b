"""A Llama checkpoint in Hugging Face format, read for a converter: NumPy and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of the folder's safetensors files in float32."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            yield name, _float32(data[begin:end], entry["dtype"]).reshape(entry["shape"])


def _float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    types = {"F16": np.float16, "F32": np.float32}
    if dtype not in types:
        raise SystemExit(f"safetensors of type {dtype} are not read here: {sorted(types)}, BF16")
    return raw.view(types[dtype]).astype(np.float32)


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of GGML's rotary embedding.

    The checkpoint rotates row i of a head with row i + head_dim / 2; GGML rotates neighbours.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise SystemExit(f"rope scaling of type {kind} is not written here")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))

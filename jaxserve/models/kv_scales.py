"""The scales of an 8-bit KV cache that a checkpoint brings."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from checkpoints import CheckpointError, SafetensorsReader
from checkpoints.gguf import is_gguf
from checkpoints.safetensors_reader import ALL_DTYPES
from checkpoints.text_names import text_name
from jaxserve.models.kv_cache import KVScales

# a number in each layer: what the stored keys, or values, are to be multiplied with. Exporters put
# it beside the projections or below the one whose output it is of.
_NAME = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(?:attn\.|k_proj\.|v_proj\.)?([kv])_scale$")


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a scale of the KV cache, which no parameter is made of."""
    return _NAME.match(text_name(name)) is not None


def kv_scale_tensors(scales: KVScales) -> dict[str, np.ndarray]:
    """The tensors that `read_kv_scales` reads them from."""
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": np.array([scale], np.float32)
        for kind, own in (("k", scales.k), ("v", scales.v))
        for layer, scale in enumerate(own)
    }


def read_kv_scales(path: str | Path, num_layers: int) -> KVScales | None:
    """The scales of keys and values of each layer; None where the checkpoint has none.

    Args:
        path: model folder with safetensors, or a GGUF file, which has none.
        num_layers: of the model.

    Raises:
        CheckpointError: some layers have scales and others do not, or one is no positive number.
    """
    if is_gguf(path):
        return None
    with SafetensorsReader(path, ALL_DTYPES) as reader:
        found: dict[tuple[str, int], float] = {}
        for name, info in reader.tensors.items():
            match = _NAME.match(text_name(name))
            if match is None:
                continue
            values = reader.read(name).astype("float32").reshape(-1)
            if values.size != 1 or not 0 < values[0] < float("inf"):
                problem = f"it must be one positive number, not {values} of shape {info.shape}"
                raise CheckpointError(reader.path, problem, name)
            found[match[2], int(match[1])] = float(values[0])
    if not found:
        return None
    missing = [
        f"{kind}_scale of layer {layer}"
        for layer in range(num_layers)
        for kind in "kv"
        if (kind, layer) not in found
    ]
    if missing:
        raise CheckpointError(path, f"scales of the KV cache are missing: {', '.join(missing)}")
    k, v = (tuple(found[kind, layer] for layer in range(num_layers)) for kind in "kv")
    return KVScales(k, v)

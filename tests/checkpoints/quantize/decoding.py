"""The meaning of each format's files, written from their descriptions, not from our writers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def fields_of(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [R, C] -> [R, C, 32 / bits], lowest bits first."""
    shifts = np.arange(0, 32, bits)
    return (words.astype(np.int64)[..., None] >> shifts) & (2**bits - 1)


def awq(tensors: Tensors, module: str, group: int) -> np.ndarray:
    """[out, in] of a linear layer in AutoAWQ's GEMM layout."""
    reverse = [0, 4, 1, 5, 2, 6, 3, 7]  # AutoAWQ's AWQ_REVERSE_ORDER
    quantised, zeros = (
        fields_of(tensors[f"{module}.{name}"], 4)[..., reverse] for name in ("qweight", "qzeros")
    )
    weight = quantised.reshape(len(quantised), -1)
    zero = zeros.reshape(len(zeros), -1).repeat(group, axis=0)
    scale = tensors[f"{module}.scales"].astype(np.float64).repeat(group, axis=0)
    return ((weight - zero) * scale).T


def gptq(tensors: Tensors, module: str) -> np.ndarray:
    """[out, in] of a linear layer of AutoGPTQ: neighbouring inputs share a word, zeros less 1."""
    words = fields_of(tensors[f"{module}.qweight"], 4)  # [in / 8, out, 8]
    weight = words.transpose(0, 2, 1).reshape(-1, words.shape[1])  # [in, out]
    zeros = fields_of(tensors[f"{module}.qzeros"], 4)
    zero = zeros.reshape(len(zeros), -1) + 1
    group_of = tensors[f"{module}.g_idx"]
    scale = tensors[f"{module}.scales"].astype(np.float64)
    return ((weight - zero[group_of]) * scale[group_of]).T


def compressed(tensors: Tensors, module: str, weights: Mapping[str, Any]) -> np.ndarray:
    """[out, in] of a linear layer of compressed-tensors."""
    scale = tensors[f"{module}.weight_scale"].astype(np.float64)
    if f"{module}.weight_packed" in tensors:
        bits = weights["num_bits"]
        outputs, inputs = tensors[f"{module}.weight_shape"]
        fields = fields_of(tensors[f"{module}.weight_packed"], bits).reshape(outputs, -1)
        elements = fields[:, :inputs] - 2 ** (bits - 1)
    else:
        elements = tensors[f"{module}.weight"].astype(np.float64)
    return elements * scale.repeat(elements.shape[1] // scale.shape[1], axis=1)

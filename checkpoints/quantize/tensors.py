"""The tensors of a quantised linear layer, as each format stores them."""

from __future__ import annotations

import numpy as np

from checkpoints.quantize.rounding import RoundedMatrix
from checkpoints.quantize.schemes import Scheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word


def stored_tensors(
    module: str,
    scheme: Scheme,
    rounded: RoundedMatrix,
    scale_dtype: np.dtype,
    input_scale: float | None = None,
) -> dict[str, np.ndarray]:
    """Name and value of the tensors that take the place of `module`.weight.

    Args:
        module: name of the layer.
        scheme: the scheme that it was rounded by.
        rounded: the rounded weight.
        scale_dtype: type of the scales.
        input_scale: of its activations, for a static scheme.
    """
    if scheme.method == "awq":
        own = awq_tensors(rounded, scale_dtype)
    elif scheme.method == "gptq":
        own = gptq_tensors(rounded, scale_dtype, scheme.bits)
    elif scheme.format == "pack-quantized":
        middle = 2 ** (scheme.bits - 1)
        fields = (rounded.elements.astype(np.int16) + middle).astype(np.uint8)
        own = {
            "weight_packed": packed(fields, scheme.bits),
            "weight_scale": rounded.scales.astype(scale_dtype),
            "weight_shape": np.array(rounded.elements.shape, np.int64),
        }
    else:
        own = {
            "weight": rounded.elements,
            "weight_scale": rounded.scales.astype(scale_dtype),
        }
    if input_scale is not None:
        own["input_scale"] = np.array([input_scale], scale_dtype)
    return {f"{module}.{name}": value for name, value in own.items()}


def packed(fields: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """uint8 [rows, columns] -> int32 [rows, columns * bits / 32]: field i of a word is order[i]."""
    count = 32 // bits
    columns = fields.shape[1]
    padded = np.pad(fields, ((0, 0), (0, -columns % count)))
    words = padded.reshape(len(fields), -1, count).astype(np.uint32)
    out = np.zeros(words.shape[:2], np.uint32)
    for place, column in enumerate(order or range(count)):
        out |= words[..., column] << np.uint32(bits * place)
    return out.view(np.int32)


def awq_tensors(rounded: RoundedMatrix, scale_dtype: np.dtype) -> dict[str, np.ndarray]:
    """By the last parts of their names; elements and zeros are unsigned."""
    assert rounded.zeros is not None
    return {
        "qweight": packed(rounded.elements.T, 4, AWQ_ORDER),
        "qzeros": packed(rounded.zeros.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(rounded.scales.T).astype(scale_dtype),
    }


def gptq_tensors(rounded: RoundedMatrix, scale_dtype: np.dtype, bits: int) -> dict[str, np.ndarray]:
    """By the last parts of their names; elements and zeros are unsigned."""
    assert rounded.zeros is not None
    inputs, groups = rounded.elements.shape[1], rounded.scales.shape[1]
    order = np.arange(inputs) if rounded.order is None else rounded.order
    group_of = np.empty(inputs, np.int32)
    group_of[order] = np.arange(inputs) // (inputs // groups)
    # the format's first version stores one less, modulo the largest
    zeros = (rounded.zeros - 1) & ((1 << bits) - 1)
    return {
        "qweight": np.ascontiguousarray(packed(rounded.elements, bits).T),
        "qzeros": packed(zeros.T, bits),
        "scales": np.ascontiguousarray(rounded.scales.T).astype(scale_dtype),
        "g_idx": group_of,
    }

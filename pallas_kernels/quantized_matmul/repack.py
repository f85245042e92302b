"""4-bit weights of AWQ and GPTQ checkpoints, repacked into Int4Weight with NumPy.

Both formats store [inputs, outputs] as int32 words of eight nibbles, group scales
[inputs / group, outputs] and packed zero points, with value = (nibble - zero) * scale.

AWQ (Lin et al., "AWQ: Activation-aware weight quantization", 2023) packs along the outputs: nibble
i of a word holds output 8 * word + (0, 2, 4, 6, 1, 3, 5, 7)[i], of weights and zeros alike.

GPTQ (Frantar et al., "GPTQ: Accurate post-training quantization", 2022) packs weights along the
inputs and zeros along the outputs, in order. Its first checkpoint format stores zero - 1, modulo
16; "gptq_v2" stores the zero itself. `g_idx` names the group of every input; quantisation in order
of activation size ("act-order") makes it irregular.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.formats import GROUPS, SYMMETRIC_ZERO, Int4Weight, pack_int4

NIBBLES = 8  # of a 32-bit word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _words(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 2 or array.dtype != np.int32:
        raise KernelError(name, f"{array.dtype}{array.shape}", "a matrix of int32 words")
    return array.view(np.uint32)


def _unpack_columns(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """uint8[R, 8 * C] of words [R, C] whose nibble i holds column order[i] of eight."""
    unpacked = np.empty((*words.shape, NIBBLES), np.uint8)
    for nibble, column in enumerate(order):
        unpacked[..., column] = (words >> np.uint32(4 * nibble)) & np.uint32(15)
    return unpacked.reshape(words.shape[0], -1)


def _weight(nibbles: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Int4Weight:
    """Int4Weight of nibbles [K, N], zeros [groups, N] and scales [groups, N]."""
    inputs, outputs = nibbles.shape
    if scales.ndim != 2 or scales.shape[1] != outputs or inputs % scales.shape[0]:
        raise KernelError(
            "scales.shape", scales.shape, f"[groups of {inputs} inputs, {outputs} outputs]"
        )
    if zeros.shape != scales.shape:
        raise KernelError("qzeros.shape", zeros.shape, f"{scales.shape} when unpacked")
    group = inputs // scales.shape[0]
    if group not in (*GROUPS, inputs):
        raise KernelError("group", group, f"32, 64, 128 or all {inputs} inputs")
    symmetric = bool((zeros == SYMMETRIC_ZERO).all())
    arrays: list[Any] = [
        pack_int4(np.ascontiguousarray(nibbles.T)),
        scales.astype(np.float32),
        None if symmetric else zeros,
    ]
    return Int4Weight(*arrays)


def repack_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Int4Weight:
    """The weight that the tensors of an AWQ ("gemm") checkpoint hold.

    Args:
        qweight: int32[K, N / 8].
        qzeros: int32[K / group, N / 8].
        scales: float16 or any other float[K / group, N].

    Returns:
        The weight [N, K], of NumPy arrays; without zeros when all zero points are 8.

    Raises:
        KernelError: the shapes or types do not fit; names the tensor.
    """
    return _weight(
        _unpack_columns(_words("qweight", qweight), AWQ_ORDER),
        _unpack_columns(_words("qzeros", qzeros), AWQ_ORDER),
        scales,
    )


def repack_gptq(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    g_idx: np.ndarray | None = None,
    *,
    version: int = 1,
) -> tuple[Int4Weight, np.ndarray | None]:
    """The weight that the tensors of a GPTQ checkpoint hold, and the order of inputs that it wants.

    Args:
        qweight: int32[K / 8, N].
        qzeros: int32[K / group, N / 8].
        scales: float16 or any other float[K / group, N].
        g_idx: int[K], the group of every input; None for groups of neighbours.
        version: 1 when zeros are stored minus one (checkpoint_format "gptq"), 2 when they are not
            ("gptq_v2").

    Returns:
        The weight [N, K], of NumPy arrays, without zeros when all zero points are 8; and None, or
        int32[K] for a weight quantised in order of activation size: multiply `x[:, order]` by it.

    Raises:
        KernelError: the shapes, types or version do not fit, or the groups of g_idx are not of
            one size; names the tensor.
    """
    if version not in (1, 2):
        raise KernelError("version", version, "1 or 2")
    packed = _words("qweight", qweight)
    nibbles = _unpack_columns(packed.T, tuple(range(NIBBLES))).T
    zeros = _unpack_columns(_words("qzeros", qzeros), tuple(range(NIBBLES)))
    if version == 1:
        zeros = (zeros + np.uint8(1)) & np.uint8(15)
    if g_idx is None:
        return _weight(nibbles, zeros, scales), None
    inputs, groups = nibbles.shape[0], scales.shape[0]
    sizes = np.bincount(g_idx, minlength=groups) if g_idx.shape == (inputs,) else None
    if sizes is None or len(sizes) != groups or (sizes * groups != inputs).any():
        raise KernelError(
            "g_idx", f"{g_idx.dtype}{g_idx.shape}", f"{inputs} group numbers, {groups} groups alike"
        )
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if (order == np.arange(inputs)).all():
        return _weight(nibbles, zeros, scales), None
    return _weight(nibbles[order], zeros, scales), order

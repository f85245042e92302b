"""The storage of ggml's tensor types: blocks of inputs with their scales, row by row.

Layouts are those of ggml's block structures. From blocks uint8 [rows, blocks, bytes] are read
elements [rows, blocks, n], and scales and, where a block has minima, offsets [rows, blocks,
groups]: value = element * scale - offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from checkpoints.quantized.quantized_matrix import Encoding

Read = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of ggml.

    Attributes:
        name: ggml's name.
        elements: numbers in a block.
        bytes: bytes of a block.
        stored: how the numbers are quantised; None: they are `dtype`.
        read_elements, read_scales, read_offsets: blocks -> numbers of quantised ones.
        dtype: of numbers that are not quantised.
    """

    name: str
    elements: int
    bytes: int
    stored: Encoding | None = None
    read_elements: Read | None = None
    read_scales: Read | None = None
    read_offsets: Read | None = None
    dtype: np.dtype | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """float32 [rows, blocks, 1] of the float16 at a byte of each block."""
    two = np.ascontiguousarray(blocks[..., at : at + 2])
    return two.view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., n] -> [..., 2 n]: the low nibbles of all, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _at(place: int) -> Read:
    return lambda blocks: _half(blocks, place)


def _from(place: int) -> Read:
    """Nibbles of the bytes from a place on."""
    return lambda blocks: _nibbles(blocks[..., place:])


def _bytes_from(place: int) -> Read:
    return lambda blocks: np.ascontiguousarray(blocks[..., place:]).view(np.int8)


def _k_scales(blocks: np.ndarray) -> np.ndarray:
    """Scales of Q4_K and Q5_K: 8 of 6 bits, packed with the minima in 12 bytes."""
    low, high = blocks[..., 4:8], blocks[..., 12:16]
    six = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    return six * _half(blocks, 0)


def _k_minima(blocks: np.ndarray) -> np.ndarray:
    low, high = blocks[..., 8:12], blocks[..., 12:16]
    six = np.concatenate([low & 63, (high >> 4) | (low >> 6 << 4)], axis=-1)
    return six * _half(blocks, 2)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    chunks = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    return _nibbles(chunks).reshape(*blocks.shape[:2], 256)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    chunks = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    low = _nibbles(chunks).reshape(*blocks.shape[:2], 8, 32)
    bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> bits) & 1
    return (low | fifth << 4).astype(np.int8).reshape(*blocks.shape[:2], 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 64)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    six = _nibbles(low).reshape(*shape, 2, 4, 32) | ((high >> shifts) & 3) << 4
    return (six.astype(np.int8) - np.int8(32)).reshape(*shape, 256)


def _q6_k_scales(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., 192:208]).view(np.int8) * _half(blocks, 208)


def _fifth_bits(place: int) -> Read:
    """5-bit numbers of Q5_0 and Q5_1: 32 fifth bits from a place on, then the nibbles."""

    def read(blocks: np.ndarray) -> np.ndarray:
        fifth = np.unpackbits(blocks[..., place : place + 4], axis=-1, bitorder="little")
        return (_nibbles(blocks[..., place + 4 :]) | fifth << 4).astype(np.int8)

    return read


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., 64] -> [..., 256]: of 32 bytes the lowest pairs of bits, then the next ones."""
    halves = packed.reshape(*packed.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (halves >> shifts & 3).reshape(*packed.shape[:-1], 256)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    bits = np.arange(8, dtype=np.uint8)[:, None]
    third = (blocks[..., None, :32] >> bits & 1).reshape(*blocks.shape[:2], 256)
    return (_two_bits(blocks[..., 32:96]) | third << 2).astype(np.int8) - np.int8(4)


def _q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    """16 of 6 bits less 32: 8 bytes of low nibbles, then 4 of pairs of high bits."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[..., None, 104:108] >> shifts & 3).reshape(*blocks.shape[:2], 16)
    six = _nibbles(blocks[..., 96:104]) | high << 4
    return (six.astype(np.int8) - np.int8(32)) * _half(blocks, 108)


# the numbers that the nibbles of IQ4_NL and IQ4_XS stand for
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    groups = blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)
    return _IQ4[_nibbles(groups)].reshape(*blocks.shape[:2], 256)


def _iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    """8 of 6 bits less 32: two bytes of pairs of high bits, then 4 of low nibbles by turns."""
    shifts = np.array([0, 2, 4, 6], np.uint8)
    high = (blocks[..., 2:4, None] >> shifts & 3).reshape(*blocks.shape[:2], 8)
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1)
    six = low.reshape(*blocks.shape[:2], 8) | high << 4
    return (six.astype(np.int8) - np.int8(32)) * _half(blocks, 0)


def _plain(name: str, dtype: np.dtype) -> BlockType:
    return BlockType(name, 1, dtype.itemsize, dtype=dtype)


TYPES = {
    0: _plain("F32", np.dtype(np.float32)),
    1: _plain("F16", np.dtype(np.float16)),
    2: BlockType("Q4_0", 32, 18, Encoding("int4", 32), _from(2), _at(0)),
    3: BlockType(
        "Q4_1", 32, 20, Encoding("int4", 32, "offset"), _from(4), _at(0), lambda b: -_half(b, 2)
    ),
    6: BlockType(
        "Q5_0", 32, 22, Encoding("int8", 32), lambda b: _fifth_bits(2)(b) - np.int8(16), _at(0)
    ),
    7: BlockType(
        "Q5_1",
        32,
        24,
        Encoding("int8", 32, "offset"),
        _fifth_bits(4),
        _at(0),
        lambda b: -_half(b, 2),
    ),
    8: BlockType("Q8_0", 32, 34, Encoding("int8", 32), _bytes_from(2), _at(0)),
    10: BlockType(
        "Q2_K",
        256,
        84,
        Encoding("int4", 16, "offset"),
        lambda b: _two_bits(b[..., 16:80]),
        lambda b: (b[..., :16] & 15) * _half(b, 80),
        lambda b: (b[..., :16] >> 4) * _half(b, 82),
    ),
    11: BlockType("Q3_K", 256, 110, Encoding("int8", 16), _q3_k, _q3_k_scales),
    12: BlockType("Q4_K", 256, 144, Encoding("int4", 32, "offset"), _q4_k, _k_scales, _k_minima),
    13: BlockType("Q5_K", 256, 176, Encoding("int8", 32, "offset"), _q5_k, _k_scales, _k_minima),
    14: BlockType("Q6_K", 256, 210, Encoding("int8", 16), _q6_k, _q6_k_scales),
    20: BlockType("IQ4_NL", 32, 18, Encoding("int8", 32), lambda b: _IQ4[_from(2)(b)], _at(0)),
    23: BlockType("IQ4_XS", 256, 136, Encoding("int8", 32), _iq4_xs, _iq4_xs_scales),
    30: _plain("BF16", np.dtype(ml_dtypes.bfloat16)),
}

# ggml's names of those that are not read
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

"""Quantised weights: what is stored, and how a matrix of floating-point numbers becomes it.

Every weight is [N, K]: N output channels of K inputs. The types are pytrees of arrays only, so
they pass through jit, are donated and are sharded like any other parameter.

The layout of 4-bit weights (one for all kernels): a row is cut into blocks of 256 inputs, and word
j (16 bits) of the 64 words of a block holds the inputs j, 64 + j, 128 + j and 192 + j of the block
in its nibbles 0 to 3, unsigned (0..15). So the same nibble of neighbouring words are neighbouring
inputs: a mask, with or without a shift, turns a tile of words into a tile of 64 inputs, and no
element changes its place. On NVIDIA GPUs such a tile of words is read from shared memory straight
into the registers in which wgmma and mma expect a tile of 16-bit numbers. Groups of 32 or 64 inputs
lie within one nibble, groups of 128 are two of them. A row with K no multiple of 256 is padded.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.pages import FLOAT_DTYPES

PIECE = 64  # words of a block, and so the inputs that the same nibble of them holds
NIBBLES = 4  # of a word
BLOCK = NIBBLES * PIECE  # inputs
GROUPS = (32, 64, 128)  # of 4-bit weights
FP8_GROUP = 128  # of e4m3
INT8_MAX = 127  # symmetric: -128 is not used
FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0  # the largest float8_e4m3fn
SYMMETRIC_ZERO = 8  # the stored nibble that stands for zero when a weight has no zeros


class Int8Weight(NamedTuple):
    """Symmetric 8-bit integers with one scale an output channel: value = values * scale."""

    values: jax.Array  # int8[N, K]
    scale: jax.Array  # float32[N]


class Int4Weight(NamedTuple):
    """4-bit integers with a scale for every group of inputs of an output channel.

    value = (nibble - zero) * scale. A group is K / scales.shape[0] neighbouring inputs: 32, 64,
    128, or all of them. Scales lie group by group, so that the scales of neighbouring output
    channels are neighbours. Without zeros the zero point is 8. Rows of `grouped_linear` may be
    filled up with words, then with scales, which are finite: rows of zeros meet them.
    """

    packed: jax.Array  # uint16[N, 64 * ceil(K / 256)], see the module
    scales: jax.Array  # float32, float16 or bfloat16[K / group, N]
    zeros: jax.Array | None = None  # uint8[K / group, N], 0..16


class Fp8Weight(NamedTuple):
    """float8_e4m3fn with one scale an output channel, one in all, or one for every 128 inputs of an
    output channel: value = values * scale."""

    values: jax.Array  # float8_e4m3fn[N, K]
    scale: jax.Array  # float32[N], float32[] or float32[K / 128, N]


QuantizedWeight = Int8Weight | Int4Weight | Fp8Weight


def packed_columns(inputs: int) -> int:
    """Words of a row of `inputs` packed 4-bit weights."""
    return -(-inputs // BLOCK) * PIECE


def group_of(inputs: int, groups: int, words: int | None) -> int:
    """Inputs that share a scale, where there are several groups.

    Args:
        inputs: of a row.
        groups: scales of a row.
        words: of a row of 4 bits; more than its inputs need are filled up, with their groups.
            None: of 8 bits.
    """
    if words is None or words == packed_columns(inputs):
        return inputs // groups
    return NIBBLES * words // groups


def pack_int4(nibbles: Any) -> Any:
    """Packs [N, K] integers 0..15 into uint16[N, packed_columns(K)]; NumPy stays NumPy."""
    array = np if isinstance(nibbles, np.ndarray) else jnp
    rows, inputs = nibbles.shape
    padding = NIBBLES * packed_columns(inputs) - inputs
    padded = array.pad(nibbles.astype(np.uint16), ((0, 0), (0, padding)))
    pieces = padded.reshape(rows, -1, NIBBLES, PIECE)
    words = pieces[:, :, 0]
    for i in range(1, NIBBLES):
        words = words | (pieces[:, :, i] << 4 * i)
    return words.reshape(rows, -1)


def unpack_int4(packed: jax.Array, inputs: int) -> jax.Array:
    """The inverse of pack_int4: int8[N, inputs] of 0..15."""
    words = packed.reshape(packed.shape[0], -1, 1, PIECE)
    shifts = jnp.arange(NIBBLES, dtype=jnp.uint16).reshape(NIBBLES, 1) * 4
    nibbles = ((words >> shifts) & 15).astype(jnp.int8)
    return nibbles.reshape(packed.shape[0], -1)[:, :inputs]


def outputs_of(weight: QuantizedWeight) -> int:
    """Output channels N of a weight."""
    return weight[0].shape[0]


def group_scales(weight: QuantizedWeight) -> tuple[jax.Array, jax.Array | None]:
    """The scales [groups, N] of a weight, and its zero points uint8[groups, N] if any."""
    if isinstance(weight, Int4Weight):
        return weight.scales, weight.zeros
    if weight.scale.ndim == 2:
        return weight.scale, None
    return jnp.broadcast_to(weight.scale, (1, outputs_of(weight))), None


def check_weight(weight: QuantizedWeight, inputs: int) -> None:
    """Judges the shapes and types of a weight of `inputs` inputs.

    Raises:
        KernelError: they do not fit each other; names the field.
    """
    if not isinstance(weight, (Int4Weight, Int8Weight, Fp8Weight)):
        raise KernelError("weight", type(weight).__name__, "Int8Weight, Int4Weight or Fp8Weight")
    outputs, columns, kind = outputs_of(weight), inputs, jnp.int8
    shapes: list[tuple[int, ...]] = [(outputs,)]
    if isinstance(weight, Int4Weight):
        columns, kind = packed_columns(inputs), jnp.uint16
        shapes = [(inputs // group, outputs) for group in GROUPS if inputs % group == 0]
        shapes.append((1, outputs))
    elif isinstance(weight, Fp8Weight):
        kind = FP8
        shapes += [()] if inputs % FP8_GROUP else [(), (inputs // FP8_GROUP, outputs)]
    stored, scale = (f"weight.{name}" for name in weight._fields[:2])
    check_array(stored, weight[0], kind, (outputs, columns))
    narrow = isinstance(weight, Int4Weight) and weight.scales.dtype in FLOAT_DTYPES
    check_array(scale, weight[1], weight[1].dtype if narrow else jnp.float32, *shapes)
    if isinstance(weight, Int4Weight) and weight.zeros is not None:
        check_array("weight.zeros", weight.zeros, jnp.uint8, weight.scales.shape)


def _nonzero(scale: jax.Array) -> jax.Array:
    """A group of zeros has the scale 1: any would do but 0."""
    return jnp.where(scale > 0.0, scale, 1.0)


def _by_group(weight: jax.Array, group: int | None = None) -> jax.Array:
    """A matrix [N, K] as float32[N, groups, inputs of a group]; None: of all."""
    if weight.ndim != 2 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise KernelError(
            "weight", f"{weight.dtype}{weight.shape}", "floating point [outputs, inputs]"
        )
    return jnp.asarray(weight, jnp.float32).reshape(len(weight), -1, group or weight.shape[1])


@jax.jit
def quantize_int8(weight: jax.Array) -> Int8Weight:
    """Rounds a matrix [N, K] to the nearest 8-bit integers, symmetrically, by output channel.

    Raises:
        KernelError: not a matrix of floating-point numbers.
    """
    wide = _by_group(weight)[:, 0]
    scale = _nonzero(jnp.abs(wide).max(axis=1) / INT8_MAX)
    return Int8Weight(jnp.round(wide / scale[:, None]).astype(jnp.int8), scale)


@functools.partial(jax.jit, static_argnames=("group", "asymmetric"))
def quantize_int4(
    weight: jax.Array, group: int | None = 128, *, asymmetric: bool = False
) -> Int4Weight:
    """Rounds a matrix [N, K] to the nearest 4-bit integers, by groups of inputs.

    Args:
        weight: the matrix.
        group: inputs that share a scale: 32, 64, 128, or None for all of a row.
        asymmetric: give every group a zero point as well, and use all 16 values; without it the
            15 values -7..7 are used.

    Raises:
        KernelError: not a matrix of floating-point numbers, or K is no multiple of the group.
    """
    if group is not None and (group not in GROUPS or weight.shape[-1] % group):
        allowed = f"None, or 32, 64 or 128 that divides {weight.shape[-1]} inputs"
        raise KernelError("group", group, allowed)
    grouped = _by_group(weight, group)
    zeros: Any = SYMMETRIC_ZERO
    if asymmetric:
        lowest = jnp.minimum(grouped.min(axis=2), 0.0)
        scales = _nonzero((jnp.maximum(grouped.max(axis=2), 0.0) - lowest) / 15)
        zeros = jnp.round(-lowest / scales)[..., None]
    else:
        scales = _nonzero(jnp.abs(grouped).max(axis=2) / 7)
    nibbles = jnp.clip(jnp.round(grouped / scales[..., None]) + zeros, 0, 15)
    kept_zeros = zeros[..., 0].T.astype(jnp.uint8) if asymmetric else None
    return Int4Weight(pack_int4(nibbles.reshape(weight.shape)), scales.T, kept_zeros)


@functools.partial(jax.jit, static_argnames="per_tensor")
def quantize_fp8(weight: jax.Array, *, per_tensor: bool = False) -> Fp8Weight:
    """Rounds a matrix [N, K] to float8_e4m3fn, scaled so that its largest value is 448.

    Args:
        weight: the matrix.
        per_tensor: one scale for the matrix instead of one an output channel.

    Raises:
        KernelError: not a matrix of floating-point numbers.
    """
    wide = _by_group(weight)[:, 0]
    scale = _nonzero(jnp.abs(wide).max(axis=None if per_tensor else 1) / FP8_MAX)
    # division may round the largest value up past 448, which converts to NaN
    scaled = jnp.clip(wide / (scale if per_tensor else scale[:, None]), -FP8_MAX, FP8_MAX)
    return Fp8Weight(scaled.astype(FP8), scale)


@functools.partial(jax.jit, static_argnames="inputs")
def dequantize(weight: QuantizedWeight, inputs: int) -> jax.Array:
    """The matrix float32[N, inputs] that a quantised weight stands for."""
    return dequantized(weight[0], *group_scales(weight), inputs)


def dequantized(
    stored: jax.Array, scales: jax.Array, zeros: jax.Array | None, inputs: int
) -> jax.Array:
    """The same of elements [N, ...] with scales and zeros [groups, N]."""
    is_int4 = stored.dtype == jnp.uint16
    elements = unpack_int4(stored, inputs) if is_int4 else stored
    wide = elements.astype(jnp.float32).reshape(*scales.T.shape, -1)
    if is_int4:
        zero: Any = SYMMETRIC_ZERO if zeros is None else zeros.T[..., None].astype(jnp.float32)
        wide = wide - zero
    return (wide * scales.T[..., None]).reshape(len(stored), inputs)

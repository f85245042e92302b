"""The sum of one tile of a product in a Triton kernel, for weights of every format.

A step loads a tile of x and tiles of the stored weight, converts the weights in registers and
multiplies on the tensor cores; where x is of 8-bit integers both stay integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantized_matmul.formats import (
    BLOCK,
    NIBBLES,
    PIECE,
    SYMMETRIC_ZERO,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
)


@dataclass(frozen=True, slots=True)
class TileFormat:
    """The static facts of a weight's elements.

    Attributes:
        width: inputs of a step.
        kind: "int4", "int8", "fp8", or "float" for elements in the type of x.
        group: inputs that share a scale, of e4m3 a multiple of the width; None when one scale
            serves a row.
    """

    width: int
    kind: str
    group: int | None = None


class TileOperands(NamedTuple):
    """References to the operands of a product with one of E matrices.

    Attributes:
        x: [M, K].
        weight: [E, N, K] or uint16[E, N, K / 4].
        scales: float32[groups, E, N]; not read where elements are in the type of x.
        zeros: uint8[groups, E, N] of 4-bit weights that have zero points of their own; else None.
        row_scale: float32[1, M] of rounded rows; else None.
    """

    x: Any
    weight: Any
    scales: Any
    zeros: Any
    row_scale: Any


def kind_of(weight: object) -> str:
    """The kind of a weight's elements, as `TileFormat` has it."""
    kinds = {Int4Weight: "int4", Int8Weight: "int8", Fp8Weight: "fp8"}
    return kinds.get(type(weight), "float")


def _from_fp8(stored: jax.Array, dtype: Any) -> jax.Array:
    """float8_e4m3fn, as its bits, in another type: a float16 with an exponent 8 too small."""
    bits = stored.astype(jnp.int32)
    moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).astype(jnp.uint16)
    half = lax.bitcast_convert_type(moved, jnp.float16)
    return (half.astype(jnp.float32) * 256.0).astype(dtype)


def _matrix(ref: Any, first: Any, rows: jax.Array, counted: jax.Array, columns: jax.Array) -> Any:
    """A tile by the indices of its rows and columns, zero where they are beyond the ends.

    `first`: the index of a matrix; None: the reference is one.
    """
    mask = counted[:, None] & (columns < ref.shape[-1])[None, :]
    shape = (rows.shape[0], columns.shape[0])
    index = [lax.broadcast_in_dim(rows, shape, [0]), lax.broadcast_in_dim(columns, shape, [1])]
    if first is not None:
        index = [jnp.full(shape, first, jnp.int32), *index]
    return plt.load(ref.at[tuple(index)], mask=mask, other=0)


def tile_sums(
    refs: TileOperands,
    form: TileFormat,
    *,
    matrix: Any,
    rows: jax.Array,
    counted: jax.Array,
    channels: tuple[jax.Array, ...],
    steps: tuple[Any, Any],
) -> list[jax.Array]:
    """Tiles float32[rows, channels] of x @ weight[matrix].T, with their scales.

    Args:
        refs: the operands.
        form: the weight's format.
        matrix: int32[], which weight.
        rows: int32[R], rows of x.
        counted: bool[R], whether the row is read.
        channels: int32[C] of each tile; what is beyond the weight's end gives zeros.
        steps: the first step and that behind the last.
    """
    ends = refs.weight.shape[1]
    inside = [chosen < ends for chosen in channels]
    shapes = [(rows.shape[0], chosen.shape[0]) for chosen in channels]
    integers = refs.x.dtype == jnp.int8
    sum_type = jnp.int32 if integers else jnp.float32

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.dot_general(
            x,
            weights.T,
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=sum_type,
        )

    def by_channel(ref: Any, group: Any, tile: int) -> jax.Array:
        """Scales or zeros of a tile's channels; zeros behind the last group."""
        groups = ref.shape[0]
        mask = inside[tile] & (group < groups)
        index = (jnp.minimum(group, groups - 1), matrix, channels[tile])
        return plt.load(ref.at[index], mask=mask, other=0)

    def whole(step: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        columns = step * form.width + jnp.arange(form.width)
        x = _matrix(refs.x, None, rows, counted, columns)
        found = []
        for tile, (total, chosen, valid) in enumerate(zip(totals, channels, inside, strict=True)):
            held = _matrix(refs.weight, matrix, chosen, valid, columns)
            held = _from_fp8(held, x.dtype) if form.kind == "fp8" else held.astype(x.dtype)
            part = product(x, held)
            if form.group is not None:
                scale = by_channel(refs.scales, step * form.width // form.group, tile)
                part = part * lax.broadcast_in_dim(scale, shapes[tile], [1])
            found.append(total + part)
        return found

    size = min(form.group or PIECE, PIECE)

    def four_bits(step: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        totals, waiting = list(totals), [jnp.zeros(shape, jnp.float32) for shape in shapes]
        for first in range(0, PIECE, size):
            words = step * PIECE + first + jnp.arange(size)
            stored = [
                _matrix(refs.weight, matrix, chosen, valid, words).astype(jnp.int32)
                for chosen, valid in zip(channels, inside, strict=True)
            ]
            for nibble in range(NIBBLES):
                column = step * BLOCK + nibble * PIECE + first
                x = _matrix(refs.x, None, rows, counted, column + jnp.arange(size))
                group = column // form.group if form.group else 0
                is_last = form.group and (nibble + 1) * PIECE % form.group == 0
                for tile, held in enumerate(stored):
                    values = (held >> (4 * nibble)) & 15
                    zero: Any = SYMMETRIC_ZERO
                    if refs.zeros is not None:
                        each = by_channel(refs.zeros, group, tile).astype(jnp.int32)
                        zero = lax.broadcast_in_dim(each, values.shape, [0])
                    elements = (values - zero).astype(jnp.float32).astype(x.dtype)
                    waiting[tile] += product(x, elements)
                    if is_last:
                        scale = by_channel(refs.scales, group, tile)
                        totals[tile] += waiting[tile] * lax.broadcast_in_dim(
                            scale, shapes[tile], [1]
                        )
                        waiting[tile] = jnp.zeros(shapes[tile], jnp.float32)
        if form.group is None:
            return [total + rest for total, rest in zip(totals, waiting, strict=True)]
        return totals

    body = four_bits if form.kind == "int4" else whole
    begin, end = steps
    sums = lax.fori_loop(begin, end, body, [jnp.zeros(shape, sum_type) for shape in shapes])
    found = [total.astype(jnp.float32) for total in sums]
    if form.group is None and form.kind != "float":
        found = [
            total * lax.broadcast_in_dim(by_channel(refs.scales, 0, tile), shapes[tile], [1])
            for tile, total in enumerate(found)
        ]
    if refs.row_scale is not None:
        scale = plt.load(refs.row_scale.at[0, rows], mask=counted, other=0)
        found = [
            total * lax.broadcast_in_dim(scale, shape, [0])
            for total, shape in zip(found, shapes, strict=True)
        ]
    return found

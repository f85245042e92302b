"""The sum of one tile of a product in a Triton kernel, for weights of every format.

A step loads a tile of x and tiles of the stored weight, converts the weights in registers and
multiplies on the tensor cores; where x is of 8-bit integers both stay integers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.quantized_matmul.formats import NIBBLES, PIECE, SYMMETRIC_ZERO
from pallas_kernels.quantized_matmul.operands import Operands


def for_triton(operands: Operands) -> Operands:
    """e4m3 elements as their bits: Ampere has no conversion from them, and Triton no such type."""
    if operands.stored.dtype != jnp.float8_e4m3fn:
        return operands
    return operands._replace(stored=lax.bitcast_convert_type(operands.stored, jnp.uint8))


def _from_fp8(stored: jax.Array, dtype: Any) -> jax.Array:
    """float8_e4m3fn, as its bits, in another type: a float16 with an exponent 8 too small."""
    bits = stored.astype(jnp.int32)
    moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).astype(jnp.uint16)
    half = lax.bitcast_convert_type(moved, jnp.float16)
    return (half.astype(jnp.float32) * 256.0).astype(dtype)


def tile_of(
    ref: Any, first: Any, rows: jax.Array, counted: jax.Array, columns: jax.Array
) -> tuple[Any, jax.Array]:
    """A tile by the indices of its rows and columns, and a mask of what is not beyond the ends.

    `first`: the index of a matrix; None: the reference is one.
    """
    shape = (rows.shape[0], columns.shape[0])
    index = [lax.broadcast_in_dim(rows, shape, [0]), lax.broadcast_in_dim(columns, shape, [1])]
    if first is not None:
        index = [jnp.full(shape, first, jnp.int32), *index]
    return ref.at[tuple(index)], counted[:, None] & (columns < ref.shape[-1])[None, :]


def _load(*place: Any) -> Any:
    """The numbers of `tile_of`, zero beyond the ends."""
    view, mask = tile_of(*place)
    return plt.load(view, mask=mask, other=0)


def tile_sums(
    refs: Operands,
    width: int,
    *,
    matrix: Any,
    rows: jax.Array,
    counted: jax.Array,
    channels: tuple[jax.Array, ...],
    steps: tuple[Any, Any],
) -> list[jax.Array]:
    """Tiles float32[rows, channels] of x @ weight[matrix].T, with their scales.

    Args:
        refs: the operands, with a weight [E, N, K], as `for_triton` has them.
        width: inputs of a step; divides a group of 8-bit elements, and is a block of packed ones.
        matrix: int32[], which weight.
        rows: int32[R], rows of x.
        counted: bool[R], whether the row is read.
        channels: int32[C] of each tile; what is beyond the weight's end gives zeros.
        steps: the first step and that behind the last.
    """
    group, kind, is_int4 = refs.group, refs.rows.dtype, refs.is_int4
    inside = [chosen < refs.outputs for chosen in channels]
    shapes = [(rows.shape[0], chosen.shape[0]) for chosen in channels]
    pieces, size = (NIBBLES, min(group or PIECE, PIECE)) if is_int4 else (1, width)
    # sums of a group wait for its scale, and those of packed elements for the end of a step
    waits = is_int4 or group is not None

    def by_channel(ref: Any, place: Any, tile: int) -> jax.Array:
        """Scales or zeros of a tile's channels; zeros behind the last group."""
        mask = inside[tile] & (place < ref.shape[1])
        index = (matrix, jnp.minimum(place, ref.shape[1] - 1), channels[tile])
        return plt.load(ref.at[index], mask=mask, other=0)

    def scaled(total: jax.Array, place: Any, tile: int) -> jax.Array:
        scale = by_channel(refs.scales, place, tile).astype(jnp.float32)
        return total * lax.broadcast_in_dim(scale, shapes[tile], [1])

    def elements(held: jax.Array, nibble: int, place: Any, tile: int) -> jax.Array:
        """Stored elements in the type of x."""
        if not is_int4:
            return _from_fp8(held, kind) if held.dtype == jnp.uint8 else held.astype(kind)
        values = (held.astype(jnp.int32) >> (4 * nibble)) & 15
        zero: Any = SYMMETRIC_ZERO
        if refs.zeros is not None:
            each = by_channel(refs.zeros, place, tile).astype(jnp.int32)
            zero = lax.broadcast_in_dim(each, values.shape, [0])
        return (values - zero).astype(jnp.float32).astype(kind)

    def body(step: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        totals = list(totals)
        waiting = [jnp.zeros(shape, jnp.float32) for shape in shapes] if waits else totals
        for first in range(0, width // pieces, size):
            columns = step * (width // pieces) + first + jnp.arange(size)
            stored = [
                _load(refs.stored, matrix, chosen, valid, columns)
                for chosen, valid in zip(channels, inside, strict=True)
            ]
            for nibble in range(pieces):
                column = step * width + nibble * PIECE + first
                x = _load(refs.rows, None, rows, counted, column + jnp.arange(size))
                place = column // group if group else 0
                for tile, held in enumerate(stored):
                    waiting[tile] += lax.dot_general(
                        x,
                        elements(held, nibble, place, tile).T,
                        (((1,), (0,)), ((), ())),
                        precision=lax.Precision.HIGHEST if kind == jnp.float32 else None,
                        preferred_element_type=refs.sum_type,
                    )
                    if group and (not is_int4 or (nibble + 1) * PIECE % group == 0):
                        totals[tile] += scaled(waiting[tile], place, tile)
                        waiting[tile] = jnp.zeros(shapes[tile], jnp.float32)
        if waits and group is None:
            return [total + rest for total, rest in zip(totals, waiting, strict=True)]
        return totals

    begin, end = steps
    sums = lax.fori_loop(begin, end, body, [jnp.zeros(shape, refs.sum_type) for shape in shapes])
    found = [total.astype(jnp.float32) for total in sums]
    if group is None and refs.scales is not None:
        found = [scaled(total, 0, tile) for tile, total in enumerate(found)]
    if refs.row_scale is not None:
        scale = plt.load(refs.row_scale.at[rows], mask=counted, other=0)[:, None]
        found = [total * scale for total in found]
    return found

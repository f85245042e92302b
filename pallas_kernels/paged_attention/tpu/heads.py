"""The keys or values of one KV head out of a block of pages in VMEM.

In most pools the heads of a token are neighbouring rows, and 16- and 8-bit rows are packed in
32-bit rows of the hardware. A block is copied once into a scratch of such 32-bit words; a head is
then a load with a stride and, where words hold several rows, a shift of whole registers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_pages import LANES, TILE_ROWS, Order, PageView


def packed_rows(dtype: Any) -> int:
    """Rows of elements in a 32-bit row."""
    return 4 // jnp.dtype(dtype).itemsize


def words_shape(view: PageView, pages: int, dtype: Any) -> tuple[int, int, int]:
    """The shape of the int32 scratch for a block of pages; the smallest where none is needed.

    Loads with a stride take 128 lanes: wider rows are cut into pieces, the first axis.
    """
    if view.order is Order.HEADS:
        return (1, TILE_ROWS, LANES)
    rows = pages * view.page_size * 2 * view.kv_heads
    return (view.head_dim // LANES, rows // packed_rows(dtype), LANES)


def store_words(view: PageView, held: Any, words: Any) -> None:
    """Copies a block [pages, *page_shape] into the scratch, where one is needed."""
    if view.order is Order.HEADS:
        return
    content = pltpu.bitcast(held[...].reshape(-1, view.head_dim), jnp.int32)
    for piece in range(words.shape[0]):
        words[piece] = content[:, LANES * piece : LANES * (piece + 1)]


def head_rows(
    view: PageView, held: Any, words: Any, part: int, head: int, dtype: Any
) -> jax.Array:  # [tokens, D]
    """The keys (part 0) or values (part 1) of a KV head, converted to `dtype`."""
    parts = [
        one
        for row in range(head * view.head_rows, (head + 1) * view.head_rows)
        for one in _lanes_of_row(view, held, words, part, row, dtype)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _lanes_of_row(
    view: PageView, held: Any, words: Any, part: int, row: int, dtype: Any
) -> list[jax.Array]:  # [tokens, 128] each, or all lanes at once
    """A row of each token's keys or values, by the lanes that a load takes."""
    if view.order is Order.HEADS:
        rows = held[:, part, pl.ds(row * view.page_size, view.page_size)]
        return [rows.reshape(-1, view.head_dim).astype(dtype)]
    packed = packed_rows(held.dtype)
    place = 2 * row + part if view.order is Order.PAIRS else part * view.kv_heads + row
    stride = 2 * view.kv_heads // packed
    pieces, rows_of_words, _ = words.shape
    chosen = pl.ds(place // packed, rows_of_words // stride, stride)
    return [
        _unpacked(words[pl.ds(piece, 1), chosen, :][0], place % packed, held.dtype).astype(dtype)
        for piece in range(pieces)
    ]


def _unpacked(word: jax.Array, place: int, dtype: Any) -> jax.Array:
    """float32: the numbers of a pool's type in one place, 0 being the lowest, of 32-bit words."""
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(word, jnp.float32)
    if dtype == jnp.bfloat16:
        bits = word << 16 if place == 0 else word & np.int32(-65536)
        return lax.bitcast_convert_type(bits, jnp.float32)
    signed = (word << (24 - 8 * place)) >> 24  # the byte, its sign extended
    if dtype == jnp.int8:
        return signed.astype(jnp.float32)
    # float8_e4m3fn: 4 bits of exponent with bias 7, 3 of fraction; float32 has bias 127 and 23
    magnitude = signed & 0x7F
    normal = lax.bitcast_convert_type((magnitude << 20) + ((127 - 7) << 23), jnp.float32)
    number = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    number = jnp.where(magnitude == 0x7F, jnp.nan, number)
    return jnp.where(signed < 0, -number, number)

"""The layout of a page in the memory of a TPU, and a Pallas kernel's view of it without a copy.

XLA stores a pool [NP, page_size, 2, KVH, D] on TPU in tiles of up to 8 rows and 128 lanes, and
packs 2 or 4 rows of 16- or 8-bit elements into each 32-bit row of the hardware. Which axis gives
the rows of a tile is chosen so that nothing is padded: the heads where they fill whole packed rows,
else keys and values (16-bit and 32-bit elements), else the tokens (8-bit elements). Seen in that
order, with the axes of a page merged into rows, the pool is the same bytes: the transposition and
the reshape below compile to bitcasts, and one DMA brings a whole page.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

TILE_ROWS = 8  # rows of 32 bits in a tile
LANES = 128


class Order(enum.Enum):
    """The order of the axes of a page in memory."""

    WHOLE_TILES = "tokens, parts, heads; the heads of a token fill whole tiles"
    TOKENS = "tokens, parts, heads"
    PAIRS = "tokens, heads, parts"
    HEADS = "parts, heads, tokens"


@dataclass(frozen=True, slots=True)
class PageView:
    """The pages of a pool as a kernel reads them.

    A row is one key or one value of one KV head; `keys` and `values` of a block of pages are
    matrices [rows, D]. Where keys and values share tiles they are the same matrix, with rows of
    keys and values in turn: the weight of a value is then `shift` rows behind that of its key.

    A head wider than a row of 128 lanes may be several rows (`head_rows`): in tiles of fewer than 8
    rows XLA would store its lanes in an order that no kernel sees without a copy.

    Attributes:
        order: order of the axes in memory.
        page_size: tokens a page.
        kv_heads: rows of the keys of a token: KV heads, times `head_rows`.
        head_dim: size of a row.
        head_rows: rows of a head, neighbours on the axis of heads.
    """

    order: Order
    page_size: int
    kv_heads: int
    head_dim: int
    head_rows: int = 1

    @staticmethod
    def of(kv_pages: jax.Array, head_dim: int) -> PageView:
        """The view of a pool [NP, page_size, 2, KVH, D], or of one with several rows a head."""
        _, page_size, _, rows, width = kv_pages.shape
        order = memory_order(rows, kv_pages.dtype)
        return PageView(order, page_size, rows, width, head_dim // width)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.kv_heads // self.head_rows

    @property
    def row_distance(self) -> int:
        """Rows of a matrix of keys or values from a row of a head to the next row of it."""
        return {Order.HEADS: self.page_size, Order.PAIRS: 2}.get(self.order, 1)

    @property
    def separate(self) -> bool:
        """Whether keys and values lie in tiles of their own."""
        return self.order in (Order.WHOLE_TILES, Order.HEADS)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape of a page in the view."""
        if self.order is Order.WHOLE_TILES:
            return (self.page_size, 2, self.kv_heads, self.head_dim)
        if self.order is Order.HEADS:
            return (2, self.kv_heads * self.page_size, self.head_dim)
        return (self.page_size * 2 * self.kv_heads, self.head_dim)

    @property
    def token_parts(self) -> tuple[int, int]:
        """How many runs of rows a token is in the view, and rows of each; not where tokens share
        words.

        Raises:
            ValueError: the order is HEADS.
        """
        if self.order is Order.HEADS:
            raise ValueError("tokens share 32-bit words in this order")
        return (1, 2 * self.kv_heads) if self.order is Order.PAIRS else (2, self.kv_heads)

    @property
    def page_rows(self) -> int:
        """Rows that a page adds to the matrix of keys, and to that of values."""
        return self.page_size * self.kv_heads * (1 if self.separate else 2)

    @property
    def shift(self) -> int:
        """Rows between a key and its value in a shared matrix; 0 in separate ones."""
        return {Order.TOKENS: self.kv_heads, Order.PAIRS: 1}.get(self.order, 0)

    def seen(self, kv_pages: jax.Array) -> jax.Array:  # [NP, *page_shape]
        """The pool in the order of its memory."""
        axes = {Order.PAIRS: (0, 1, 3, 2, 4), Order.HEADS: (0, 2, 3, 1, 4)}.get(self.order)
        ordered = kv_pages if axes is None else jnp.transpose(kv_pages, axes)
        return ordered.reshape(kv_pages.shape[0], *self.page_shape)

    def restored(self, seen: jax.Array) -> jax.Array:  # [NP, page_size, 2, KVH, D]
        """The pool that is `seen` in the order of its memory."""
        pages, size, heads, head_dim = seen.shape[0], self.page_size, self.kv_heads, self.head_dim
        if self.order is Order.PAIRS:
            return seen.reshape(pages, size, heads, 2, head_dim).swapaxes(2, 3)
        if self.order is Order.HEADS:
            return seen.reshape(pages, 2, heads, size, head_dim).transpose(0, 3, 1, 2, 4)
        return seen.reshape(pages, size, 2, heads, head_dim)

    def tokens(self, rows: jax.Array) -> jax.Array:  # [parts, T, rows, D]
        """Keys and values [T, 2, KVH, D] of tokens, each token the runs of `token_parts`."""
        parts, count = self.token_parts
        if self.order is Order.PAIRS:
            return rows.swapaxes(1, 2).reshape(parts, rows.shape[0], count, self.head_dim)
        return rows.swapaxes(0, 1)

    def rows_of(self, held: Any, part: int) -> jax.Array:  # [pages * page_rows, D]
        """The keys (part 0) or values (part 1) of pages [pages, *page_shape]."""
        if self.order is Order.WHOLE_TILES:
            held = held[:, :, part]
        elif self.order is Order.HEADS:
            held = held[:, part]
        return held[...].reshape(-1, self.head_dim)

    def row_facts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token, KV head and part (0 or 1; 0 in separate matrices) of each of the page's rows."""
        sizes = {
            Order.WHOLE_TILES: (("token", self.page_size), ("head", self.kv_heads)),
            Order.HEADS: (("head", self.kv_heads), ("token", self.page_size)),
            Order.TOKENS: (("token", self.page_size), ("part", 2), ("head", self.kv_heads)),
            Order.PAIRS: (("token", self.page_size), ("head", self.kv_heads), ("part", 2)),
        }[self.order]
        grids = np.meshgrid(*(np.arange(size) for _, size in sizes), indexing="ij")
        named = {name: grid.reshape(-1) for (name, _), grid in zip(sizes, grids)}
        part = named.get("part", np.zeros(self.page_rows, np.int64))
        return named["token"], named["head"], part


def memory_order(kv_heads: int, pool_dtype: DTypeLike) -> Order:
    """The order in which XLA lays out the axes of a page so that no tile is padded."""
    packed = 4 // jnp.dtype(pool_dtype).itemsize
    if kv_heads % TILE_ROWS == 0:
        return Order.WHOLE_TILES
    if kv_heads in (1, 2, 4) and kv_heads % packed == 0:
        return Order.TOKENS
    return Order.PAIRS if packed < 4 else Order.HEADS

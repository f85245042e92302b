"""The static facts of the Hopper decode kernel: a thread block's memory and its share of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import TILE_ROWS, WGMMA_ROWS, row_tiles
from pallas_kernels.paged_attention.hopper.decode_work import Piece
from pallas_kernels.paged_attention.options import Scores

THREADS = ("attend", "fetch")  # the warpgroups of a thread block
HELD_FIELDS = len(Piece._fields) + 3  # of a piece, and where it stands in the walk
Q_BUFFERS = 2  # pieces with queries on their way or being attended


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The static facts of one decode kernel.

    Attributes:
        group: query heads of one KV head that a thread block attends; each query of a row counts.
        head_tiles: thread blocks among which the query heads of a KV head are divided.
        sharing: groups with queries that fill one tile of columns together. A thread block attends
            them all, for products of fewer columns there are none, and drops the others' results.
        queries: the most of a row.
        heads: query heads of a KV head: as many heads of a group belong to one query.
        head_dim: size of a head.
        page_size: tokens a page.
        block_tokens: keys a step, a multiple of 64.
        stages: steps with keys and values on their way or being attended.
        most_pieces: into which the tokens of a slot may be cut.
        pool_dtype: element type of the pages.
        dtype: element type of queries, of the matrix products and of the result.
        scores: static options of the scores.
        sinks: whether each head has a logit without a value.
    """

    group: int
    head_tiles: int
    sharing: int
    queries: int
    heads: int
    head_dim: int
    page_size: int
    block_tokens: int
    stages: int
    most_pieces: int
    pool_dtype: np.dtype
    dtype: np.dtype
    scores: Scores
    sinks: bool

    @property
    def columns(self) -> int:
        """The group or groups of a tile, rounded up to what wgmma takes."""
        return -(-self.sharing * self.group // TILE_ROWS) * TILE_ROWS

    def tile_of(self, group: jax.Array) -> jax.Array:
        """The tile of queries that holds those of a group."""
        return group if self.sharing == 1 else lax.div(group, jnp.int32(self.sharing))

    def first_column(self, group: jax.Array) -> jax.Array | int:
        """Of a group, in its tile."""
        return 0 if self.sharing == 1 else lax.rem(group, jnp.int32(self.sharing)) * self.group

    @property
    def channels(self) -> int:
        """Head_dim rounded up to the rows of wgmma; the extra ones are never read."""
        return -(-self.head_dim // WGMMA_ROWS) * WGMMA_ROWS

    @property
    def quantized(self) -> bool:
        """Whether pages hold 8-bit numbers, which are widened to `dtype` in shared memory."""
        return self.pool_dtype.itemsize == 1

    @property
    def rows(self) -> int:
        """Tokens of one copy: a page, or as much of it as fits into a step."""
        return min(self.page_size, self.block_tokens)

    @property
    def value_rows(self) -> int:
        """Tokens of one copy of values: a tile's rows where they are padded to `channels`."""
        padded = self.channels > self.head_dim and not self.quantized
        return TILE_ROWS if padded else self.rows

    @property
    def copies(self) -> int:
        """Copies of keys a step."""
        return self.block_tokens // self.rows

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of a thread block."""
        block = (self.stages, self.block_tokens)
        tiles = row_tiles(self.head_dim, self.dtype)
        memory = {
            "q_smem": plgpu.SMEM(
                (Q_BUFFERS, self.columns, self.head_dim), self.dtype, transforms=tiles
            ),
            "p_smem": plgpu.SMEM(
                (self.columns, self.block_tokens),
                self.dtype,
                # wgmma wants one swizzle for both operands: that of the values
                transforms=tiles,
            ),
            "out_smem": plgpu.SMEM((self.columns, self.channels), self.dtype),
            "ended_smem": plgpu.SMEM((1,), jnp.int32),
            "piece_smem": plgpu.SMEM((Q_BUFFERS, HELD_FIELDS), jnp.int32),
            # the fields of the piece, and its queries
            "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=Q_BUFFERS),
            "q_free": plgpu.Barrier(num_barriers=Q_BUFFERS),
            "k_ready": plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages),
            "v_ready": plgpu.Barrier(
                num_arrivals=self.block_tokens // self.value_rows, num_barriers=self.stages
            ),
            "k_free": plgpu.Barrier(num_barriers=self.stages),
            "v_free": plgpu.Barrier(num_barriers=self.stages),
        }
        if self.quantized:
            raw_tiles = row_tiles(self.head_dim, self.pool_dtype)
            raw = plgpu.SMEM((*block, self.head_dim), self.pool_dtype, transforms=raw_tiles)
            memory |= {
                "k_raw": raw,
                "v_raw": raw,
                "k_smem": plgpu.SMEM((1, *block[1:], self.head_dim), self.dtype, transforms=tiles),
                "v_smem": plgpu.SMEM((1, *block[1:], self.channels), self.dtype, transforms=tiles),
            }
        else:
            memory |= {
                "k_smem": plgpu.SMEM((*block, self.head_dim), self.dtype, transforms=tiles),
                "v_smem": plgpu.SMEM((*block, self.channels), self.dtype, transforms=tiles),
            }
        return memory

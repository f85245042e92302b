"""The static facts of the Hopper decode kernel: a thread block's memory and its share of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.decode_work import Piece
from pallas_kernels.paged_attention.options import Scores

MASKED = -1e30  # finite: exp2(MASKED - MASKED) is 1, not NaN
LOG2E = math.log2(math.e)
WGMMA_ROWS = 64
TILE_ROWS = 8  # rows of one shared memory tile, and the step of wgmma's second dimension
THREADS = ("attend", "fetch")  # the warpgroups of a thread block
HELD_FIELDS = len(Piece._fields) + 2  # of a piece, and where it stands in the walk
Q_BUFFERS = 2  # pieces whose queries are on their way or being attended


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The static facts of one decode kernel.

    Attributes:
        group: query heads of one KV head that a thread block attends; each query of a row counts.
        head_tiles: thread blocks among which the query heads of a KV head are divided.
        queries: of a row, at most.
        heads: query heads of a KV head: as many heads of a group belong to one query.
        head_dim: size of a head.
        page_size: tokens a page.
        block_tokens: keys a step, a multiple of 64.
        stages: steps whose keys and values are on their way or being attended.
        most_pieces: into which the tokens of a slot may be cut.
        pool_dtype: element type of the pages.
        dtype: element type of queries, of the matrix products and of the result.
        page_scales: whether 8-bit pages have a scale each; else one for the whole pool.
        scores: static options of the scores.
        sinks: whether each head has a logit without a value.
        fetch_by_warp: whether one warp issues the copies, not its whole warpgroup in step, which
            costs a barrier and four times the instructions a copy.
    """

    group: int
    head_tiles: int
    queries: int
    heads: int
    head_dim: int
    page_size: int
    block_tokens: int
    stages: int
    most_pieces: int
    pool_dtype: np.dtype
    dtype: np.dtype
    page_scales: bool
    scores: Scores
    sinks: bool
    fetch_by_warp: bool

    @property
    def columns(self) -> int:
        """The group, rounded up to what wgmma takes."""
        return -(-self.group // TILE_ROWS) * TILE_ROWS

    @property
    def whole_rows(self) -> int:
        """Of the result of a row in one piece; a copy that passes it on has multiples of 128 B."""
        return self.group if self.most_pieces == 1 else self.columns

    @property
    def channels(self) -> int:
        """Head_dim rounded up to the rows of wgmma; nobody reads what the extra ones hold."""
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
        """Copies of keys a step; as many pages, or parts of one, have a scale each."""
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
                transforms=swizzled(swizzle_bytes(self.head_dim, self.dtype), self.dtype),
            ),
            "out_smem": plgpu.SMEM((self.columns, self.channels), self.dtype),
            "piece_smem": plgpu.SMEM((Q_BUFFERS, HELD_FIELDS), jnp.int32),
            # the fields of the piece, and its queries
            "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=Q_BUFFERS),
            "q_free": plgpu.Barrier(num_barriers=Q_BUFFERS),
            "k_ready": plgpu.Barrier(
                num_arrivals=self.copies + self.page_scales, num_barriers=self.stages
            ),
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
        if self.page_scales:
            memory["scale_smem"] = plgpu.SMEM((self.stages + 1, 2, self.copies), jnp.float32)
        return memory


def swizzle_bytes(columns: int, dtype: np.dtype) -> int | None:
    """The widest swizzle whose rows divide so many elements; None where there is none."""
    size = columns * dtype.itemsize
    return next((swizzle for swizzle in (128, 64, 32) if size % swizzle == 0), None)


def swizzled(swizzle: int | None, dtype: np.dtype) -> tuple[Any, ...]:
    """The layout that TMA and wgmma share."""
    if swizzle is None:
        return ()
    return (
        plgpu.TilingTransform((TILE_ROWS, swizzle // dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )


def row_tiles(columns: int, dtype: np.dtype) -> tuple[Any, ...]:
    """The layout for rows of so many elements."""
    return swizzled(swizzle_bytes(columns, dtype), dtype)

"""The data of a thread block of the Hopper prefill kernel, and its shapes in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import WGMMA_ROWS
from pallas_kernels.paged_attention.hopper.prefill_work import WorkItem
from pallas_kernels.paged_attention.options import Scores

CONSUMERS = 2  # warpgroups that attend
MOST_HEADS = 4  # of a warpgroup


@dataclass(frozen=True, slots=True)
class Geometry:
    """The part of the query that a thread block holds.

    Attributes:
        heads: query heads of one warpgroup.
        rows: rows of the region of one warpgroup; heads * rows = 64.
        split_heads: the warpgroups have different heads of the same rows; else other rows of the
            same heads.
    """

    heads: int
    rows: int
    split_heads: bool

    @property
    def tile_heads(self) -> int:
        """Heads of the thread block."""
        return self.heads * (CONSUMERS if self.split_heads else 1)

    @property
    def tile_rows(self) -> int:
        """Rows of the thread block."""
        return self.rows * (1 if self.split_heads else CONSUMERS)


def geometry(group: int) -> Geometry:
    """The packing for so many query heads a KV head: as many heads as divide it, up to 4.

    Few rows a tile waste little at the causal edge and on short chunks. With 8 heads of 8 rows the
    two rows of a thread have one mask, and the assembler spills what it keeps of it.
    """
    if group % 2:
        return Geometry(heads=1, rows=WGMMA_ROWS, split_heads=False)
    heads = math.gcd(group // 2, MOST_HEADS)
    return Geometry(heads=heads, rows=WGMMA_ROWS // heads, split_heads=True)


@dataclass(frozen=True, slots=True)
class Options:
    """The static choices of one kernel."""

    scores: Scores
    sinks: bool
    geometry: Geometry
    block_tokens: int
    stages: int
    raw_stages: int  # of 8-bit keys and values as they are in the pages; 0 for 16-bit pages
    interpreted: bool

    @property
    def quantized(self) -> bool:
        """Whether pages hold 8-bit numbers, which are widened in shared memory."""
        return self.raw_stages > 0


def row_vector(value: float) -> jax.Array:  # float32[64]
    vector = jnp.full((WGMMA_ROWS,), value, jnp.float32)
    return plgpu.layout_cast(vector, plgpu.Layout.WGMMA.reduce(1))


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


class Refs(NamedTuple):
    """The operands and the result in global memory; shared memory and barriers by name."""

    q: Any  # [C, H, D]
    kv: Any  # [NP, page_size, 2, KVH, D]
    table: Any  # int32[N, P]
    work: Any  # int32[T, 5]
    base: Any  # int32[1], added to every page id
    scales: tuple[Any, ...]  # float32[1] of 8-bit keys and of values, else nothing
    sinks: Any  # float32[H] or None
    out: Any  # [C, H, D]
    scratch: dict[str, Any]


class Tile(NamedTuple):
    """The work of a thread block, and what follows from it."""

    item: WorkItem
    lowest: jax.Array  # position of the first row that is attended
    length: jax.Array  # keys up to the last row's own
    first_key: jax.Array  # that some row may see
    first_block: jax.Array
    steps: jax.Array  # blocks of keys that some row may see


class Part(NamedTuple):
    """An attending warpgroup's part of the tile."""

    warpgroup: jax.Array
    first_head: jax.Array
    row_offset: jax.Array  # its first row in the tile


class Attended(NamedTuple):
    """The results of a warpgroup for its 64 rows: weights are exp2(score - highest)."""

    out: jax.Array  # float32[64, D], the weighted sum of values
    highest: jax.Array  # float32[64], the largest score in base 2, at least MASKED
    total: jax.Array  # float32[64], the sum of weights


def read_item(work: Any, index: jax.Array) -> WorkItem:
    """A row of the work table."""
    return WorkItem(*(work[index, column] for column in range(len(WorkItem._fields))))


def tile_of(item: WorkItem, options: Options) -> Tile:
    """The keys that a tile of query rows sees."""
    block = jnp.int32(options.block_tokens)
    lowest, length = item.position + item.low, item.position + item.high
    first_key = jnp.int32(0)
    if options.scores.window is not None:
        first_key = jnp.maximum(lowest - (options.scores.window - 1), 0)
    first_block = lax.div(first_key, block)
    steps = lax.div(length + (block - 1), block) - first_block
    return Tile(item, lowest, length, first_key, first_block, steps)

"""The warpgroup of the Hopper prefill kernel that brings 8-bit keys and values and widens them.

The numbers of a block land in shared memory as they are in the pages; this warpgroup converts them
to the type of the queries, exactly, on their way into the ring, once for both warpgroups that
attend. Scales stay out of the 16-bit numbers: they go into the float32 scores and weights.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import WGMMA_ROWS, widened
from pallas_kernels.paged_attention.hopper.prefill_fetch import (
    at_edge,
    await_use,
    by_one_warp,
    clear_invisible,
    fetch,
    page_ids,
)
from pallas_kernels.paged_attention.hopper.prefill_plan import Options, Refs, Tile

CHUNK_COLUMNS = 128  # that are read at once: the widest swizzle of 8-bit numbers
WIDENED_COLUMNS = 64  # and widened at once: more would not fit the registers


def produce_widened(tile: Tile, kv_head: jax.Array, options: Options, refs: Refs) -> None:
    """Brings the tile's blocks of 8-bit keys and values into the ring, in order, in 16 bits."""
    scratch, stages, depth = refs.scratch, options.stages, options.raw_stages
    raw_smem = scratch["raw_smem"]
    # every int8 is a number; unseen e4m3 bits may be NaN
    clears = raw_smem.dtype != jnp.int8

    def request(step: jax.Array, ids: tuple[jax.Array, ...], part: int) -> None:
        slot = lax.rem(step, jnp.int32(depth))
        low_key = (tile.first_block + step) * options.block_tokens
        landed = scratch["raw_ready"].at[2 * slot + part]
        raw = raw_smem.at[slot, part]
        begin = functools.partial(fetch, low_key, ids, (part, kv_head), raw, landed, refs)
        by_one_warp(begin)

    def begin(step: jax.Array, _: None) -> None:
        ids = page_ids(step, tile, options, refs)
        for part in range(2):
            request(step, ids, part)

    def bring(step: jax.Array, _: None) -> None:
        stage = lax.rem(step, jnp.int32(stages))
        slot = lax.rem(step, jnp.int32(depth))
        low_key = (tile.first_block + step) * options.block_tokens
        # read early: it answers from memory while the keys are converted
        later = page_ids(step + depth, tile, options, refs)
        for part, kind in enumerate("kv"):
            wide, free = scratch[f"{kind}_smem"].at[stage], scratch[f"{kind}_free"].at[stage]

            @pl.when(step >= stages)
            def _(free: Any = free) -> None:
                plgpu.barrier_wait(free)

            plgpu.barrier_wait(scratch["raw_ready"].at[2 * slot + part])
            _widen(raw_smem.at[slot, part], wide)
            if kind == "v" and clears:

                @pl.when(at_edge(low_key, tile, options))
                def _(wide: Any = wide) -> None:
                    plgpu.commit_smem()
                    clear_invisible(wide, low_key, tile)

            plgpu.commit_smem()  # of the numbers as read, too: TMA is to write there next
            plgpu.barrier_arrive(scratch[f"{kind}_ready"].at[stage])

            @pl.when(step + depth < tile.steps)
            def _(part: int = part) -> None:
                request(step + depth, later, part)

    lax.fori_loop(0, jnp.minimum(tile.steps, depth), begin, None)
    lax.fori_loop(0, tile.steps, bring, None)
    await_use(tile, options, scratch)


def _widen(raw: Any, wide: Any) -> None:
    """Copies 8-bit numbers to a reference of the type that is multiplied; not committed."""
    block_tokens, head_dim = raw.shape
    columns = min(head_dim, CHUNK_COLUMNS)
    piece = min(columns, WIDENED_COLUMNS) if columns % WIDENED_COLUMNS == 0 else columns
    chunks = head_dim // columns

    def widen(chunk: jax.Array, _: None) -> None:
        first = pl.multiple_of(lax.div(chunk, jnp.int32(chunks)) * WGMMA_ROWS, WGMMA_ROWS)
        column = pl.multiple_of(lax.rem(chunk, jnp.int32(chunks)) * columns, columns)
        rows = pl.ds(first, WGMMA_ROWS)
        stored = raw[rows, pl.ds(column, columns)]
        stored = plgpu.layout_cast(stored, plgpu.Layout.WGMMA_UPCAST_2X)
        for low in range(0, columns, piece):
            target = pl.multiple_of(column + low, piece)
            wide[rows, pl.ds(target, piece)] = widened(stored[:, low : low + piece], wide.dtype)

    lax.fori_loop(0, block_tokens // WGMMA_ROWS * chunks, widen, None)

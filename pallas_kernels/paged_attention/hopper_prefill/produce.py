"""The warpgroup of the Hopper prefill kernel that brings keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.hopper_prefill.layout import (
    WARPGROUP_ROWS,
    Options,
    Refs,
    Tile,
    iota,
    swizzle_elements,
)


def produce(tile: Tile, kv_head: jax.Array, options: Options, refs: Refs) -> None:
    """Brings the tile's blocks of keys and values into the ring, in order."""
    page_size, _, _, head_dim = refs.kv.shape[1:]
    scratch = refs.scratch
    block_tokens, stages = options.block_tokens, options.stages
    piece = min(page_size, block_tokens)
    pieces = block_tokens // piece
    k_smem, v_smem = scratch["k_smem"], scratch["v_smem"]
    first_page = refs.base[0]
    lowest_page = lax.div(tile.first_key, jnp.int32(page_size))
    highest_page = jnp.maximum(lax.div(tile.length + (page_size - 1), jnp.int32(page_size)) - 1, 0)

    def page_ids(step: jax.Array) -> tuple[jax.Array, ...]:
        # pages outside the visible range may be anybody's: the nearest visible one is read twice
        token = (tile.first_block + step) * block_tokens
        pages = [lax.div(token + j * piece, jnp.int32(page_size)) for j in range(pieces)]
        return tuple(
            refs.table[tile.item.lane, jnp.clip(page, lowest_page, highest_page)] + first_page
            for page in pages
        )

    def fetch(
        low_key: jax.Array, ids: tuple[jax.Array, ...], part: int, smem: Any, ready: Any
    ) -> None:
        offset: Any = 0
        if piece < page_size:
            offset = pl.multiple_of(lax.rem(low_key, jnp.int32(page_size)), piece)
        for j, page in enumerate(ids):
            plgpu.copy_gmem_to_smem(
                refs.kv.at[page, pl.ds(offset, piece), part, kv_head],
                smem.at[pl.ds(j * piece, piece)],
                ready,
            )

    def clear_invisible(smem: Any, low_key: jax.Array) -> None:
        """Zeros for the values that no row may see: a weight of 0 * NaN would be NaN."""
        columns = swizzle_elements(head_dim, smem.dtype)

        def clear(group: jax.Array, _: None) -> None:
            first = pl.multiple_of(group * WARPGROUP_ROWS, WARPGROUP_ROWS)
            for column in range(0, head_dim, columns):
                chunk = smem.at[pl.ds(first, WARPGROUP_ROWS), pl.ds(column, columns)]
                held = plgpu.layout_cast(chunk[...], plgpu.Layout.WGMMA)
                key = low_key + first + iota(held.shape, 0)
                seen = (key >= tile.first_key) & (key < tile.length)
                chunk[...] = jnp.where(seen, held, jnp.zeros_like(held))

        lax.fori_loop(0, block_tokens // WARPGROUP_ROWS, clear, None)

    def bring(step: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage = lax.rem(step, jnp.int32(stages))
        low_key = (tile.first_block + step) * block_tokens
        edge = (low_key < tile.first_key) | (low_key + block_tokens > tile.length)
        # read early: the page table answers from memory while this block waits for its place
        next_ids = page_ids(step + 1)
        v_ready, v_landed = scratch["v_ready"].at[stage], scratch["v_landed"]

        @pl.when(step >= stages)
        def _() -> None:
            plgpu.barrier_wait(scratch["k_free"].at[stage])

        fetch(low_key, ids, 0, k_smem.at[stage], scratch["k_ready"].at[stage])

        @pl.when(step >= stages)
        def _() -> None:
            plgpu.barrier_wait(scratch["v_free"].at[stage])

        @pl.when(jnp.logical_not(edge))
        def _() -> None:
            fetch(low_key, ids, 1, v_smem.at[stage], v_ready)

        @pl.when(edge)
        def _() -> None:
            fetch(low_key, ids, 1, v_smem.at[stage], v_landed)
            plgpu.barrier_wait(v_landed)
            clear_invisible(v_smem.at[stage], low_key)
            plgpu.commit_smem()
            for _ in range(pieces):  # in place of the copies
                plgpu.barrier_arrive(v_ready)

        return next_ids

    lax.fori_loop(0, tile.steps, bring, page_ids(jnp.int32(0)))

    def await_use(step: jax.Array, _: None) -> None:
        stage = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(scratch["k_free"].at[stage])
        plgpu.barrier_wait(scratch["v_free"].at[stage])

    # every arrival is waited for, so that the barriers end as they began
    lax.fori_loop(jnp.maximum(tile.steps - stages, 0), tile.steps, await_use, None)

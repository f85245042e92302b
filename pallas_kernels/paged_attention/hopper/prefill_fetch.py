"""The warpgroup of the Hopper prefill kernel that brings keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import WGMMA_ROWS, swizzle_elements
from pallas_kernels.paged_attention.hopper.prefill_plan import Options, Refs, Tile, iota
from pallas_kernels.paged_attention.hopper.visible import visible_range


def produce(tile: Tile, kv_head: jax.Array, options: Options, refs: Refs) -> None:
    """Brings the tile's blocks of 16-bit keys and values into the ring, in order."""
    scratch = refs.scratch
    block_tokens, stages = options.block_tokens, options.stages
    copies = copies_of_block(options, refs)
    k_smem, v_smem = scratch["k_smem"], scratch["v_smem"]

    def bring(step: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage = lax.rem(step, jnp.int32(stages))
        low_key = (tile.first_block + step) * block_tokens
        # read early: the page table answers from memory while this block waits for its place
        next_ids = page_ids(step + 1, tile, options, refs)
        v_ready, v_landed = scratch["v_ready"].at[stage], scratch["v_landed"]
        edge = at_edge(low_key, tile, options)
        inside = jnp.logical_not(edge)

        def bring_block() -> None:
            # these barriers are waited for here alone: each thread counts the phases that it saw
            @pl.when(step >= stages)
            def _() -> None:
                plgpu.barrier_wait(scratch["k_free"].at[stage])

            k_ready = scratch["k_ready"].at[stage]
            fetch(low_key, ids, (0, kv_head), k_smem.at[stage], k_ready, refs)

            @pl.when(step >= stages)
            def _() -> None:
                plgpu.barrier_wait(scratch["v_free"].at[stage])

            values = v_smem.at[stage]
            for reached, landed in ((inside, v_ready), (edge, v_landed)):
                pl.when(reached)(
                    functools.partial(fetch, low_key, ids, (1, kv_head), values, landed, refs)
                )

        by_one_warp(bring_block)

        @pl.when(edge)
        def _() -> None:
            plgpu.barrier_wait(v_landed)
            clear_invisible(v_smem.at[stage], low_key, tile)
            plgpu.commit_smem()
            for _ in range(copies):  # in place of the copies
                plgpu.barrier_arrive(v_ready)

        return next_ids

    lax.fori_loop(0, tile.steps, bring, page_ids(jnp.int32(0), tile, options, refs))
    by_one_warp(functools.partial(await_use, tile, options, scratch))


def by_one_warp(issue: Callable[[], None]) -> None:
    """Lets one warp of the producer issue copies: fewer threads arrive at the barriers.

    JAX cannot map warps in a shard_map that checks how references vary (check_vma).
    """
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(issue))


def copies_of_block(options: Options, refs: Refs) -> int:
    """Copies of keys a block: one for each page, or for the part of one that a block is."""
    return options.block_tokens // min(refs.kv.shape[1], options.block_tokens)


def page_ids(step: jax.Array, tile: Tile, options: Options, refs: Refs) -> tuple[jax.Array, ...]:
    """The page of each copy of a block of keys."""
    page_size = refs.kv.shape[1]
    size = jnp.int32(page_size)
    visible = visible_range(tile.first_key, tile.length, page_size)
    token = (tile.first_block + step) * options.block_tokens
    pages = [lax.div(token + j * page_size, size) for j in range(copies_of_block(options, refs))]
    return tuple(
        refs.table[tile.item.lane, jnp.clip(page, *visible)] + refs.base[0] for page in pages
    )


def fetch(
    low_key: jax.Array,
    ids: tuple[jax.Array, ...],
    part: tuple[int, jax.Array],  # keys or values, KV head
    smem: Any,  # [block_tokens, D]
    ready: Any,
    refs: Refs,
) -> None:
    """Begins to copy a block of keys or values; `ready` has an arrival for every copy."""
    page_size = refs.kv.shape[1]
    piece = smem.shape[0] // len(ids)
    offset: Any = 0
    if piece < page_size:
        offset = pl.multiple_of(lax.rem(low_key, jnp.int32(page_size)), piece)
    for j, page in enumerate(ids):
        plgpu.copy_gmem_to_smem(
            refs.kv.at[page, pl.ds(offset, piece), *part], smem.at[pl.ds(j * piece, piece)], ready
        )


def at_edge(low_key: jax.Array, tile: Tile, options: Options) -> jax.Array:
    """Whether a block holds keys that no row of the tile may see."""
    return (low_key < tile.first_key) | (low_key + options.block_tokens > tile.length)


def clear_invisible(smem: Any, low_key: jax.Array, tile: Tile) -> None:
    """Zeros for the values that no row may see: a weight of 0 * NaN would be NaN."""
    block_tokens, head_dim = smem.shape
    columns = swizzle_elements(head_dim, smem.dtype)

    def clear(group: jax.Array, _: None) -> None:
        first = pl.multiple_of(group * WGMMA_ROWS, WGMMA_ROWS)
        for column in range(0, head_dim, columns):
            chunk = smem.at[pl.ds(first, WGMMA_ROWS), pl.ds(column, columns)]
            held = plgpu.layout_cast(chunk[...], plgpu.Layout.WGMMA)
            key = low_key + first + iota(held.shape, 0)
            seen = (key >= tile.first_key) & (key < tile.length)
            chunk[...] = jnp.where(seen, held, jnp.zeros_like(held))

    lax.fori_loop(0, block_tokens // WGMMA_ROWS, clear, None)


def await_use(tile: Tile, options: Options, scratch: dict[str, Any]) -> None:
    """Waits for every arrival that is still to come, so that the barriers end as they began."""
    stages = options.stages

    def await_stage(step: jax.Array, _: None) -> None:
        stage = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(scratch["k_free"].at[stage])
        plgpu.barrier_wait(scratch["v_free"].at[stage])

    lax.fori_loop(jnp.maximum(tile.steps - stages, 0), tile.steps, await_stage, None)

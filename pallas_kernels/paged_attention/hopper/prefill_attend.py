"""The warpgroups of the Hopper prefill kernel that multiply and compute the softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import transposed
from pallas_kernels.hopper.tiles import TILE_ROWS, WGMMA_ROWS
from pallas_kernels.interpreter import add_product
from pallas_kernels.paged_attention.hopper.prefill_plan import (
    Attended,
    Options,
    Part,
    Refs,
    Tile,
    iota,
    row_vector,
)
from pallas_kernels.paged_attention.softmax import LOG2E, MASKED


def attend(tile: Tile, part: Part, options: Options, refs: Refs) -> Attended:
    """Attends 64 rows: the part's rows for its first head, then for the next, and so on."""
    heads, rows = options.geometry.heads, options.geometry.rows
    head_dim = refs.q.shape[2]
    scratch, warpgroup, first_head = refs.scratch, part.warpgroup, part.first_head
    dtype = scratch["v_smem"].dtype
    block_tokens, stages = options.block_tokens, options.stages
    scale, soft_cap, window = options.scores
    q_smem = scratch["q_smem"].at[warpgroup]
    k_smem, v_smem, turn = scratch["k_smem"], scratch["v_smem"], scratch["turn"]
    q_ready = scratch["q_ready"].at[warpgroup]
    first_row = pl.multiple_of(tile.item.row + part.row_offset, TILE_ROWS)

    for head in range(heads):
        plgpu.copy_gmem_to_smem(
            refs.q.at[pl.ds(first_row, rows), first_head + head],
            q_smem.at[pl.ds(head * rows, rows)],
            q_ready,
        )

    # the scale goes into the exponent's multiply-add, where nothing comes between
    folded = soft_cap is None and scale > 0
    unit = scale * LOG2E if folded else 1.0
    first_position = tile.item.position + part.row_offset

    def bounded(scores: jax.Array) -> jax.Array:
        if folded:
            return scores
        if soft_cap is None:
            return scores * (scale * LOG2E)
        # tanh(x) = 1 - 2 / (exp(2x) + 1); the GPU's own tanh has 11 bits
        grown = jnp.exp2(scores * (2.0 * LOG2E * scale / soft_cap))
        # two instructions, where a division by a number of unknown size is ten
        root = lax.rsqrt(grown + 1.0)
        return (soft_cap * LOG2E) - (2.0 * soft_cap * LOG2E) * (root * root)

    shape = (WGMMA_ROWS, block_tokens)

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    plgpu.barrier_wait(q_ready)

    @pl.when(tile.steps > 0)
    def _() -> None:
        plgpu.barrier_wait(scratch["k_ready"].at[0])

    pl.when(warpgroup == 1)(take_turn)

    def block(
        step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, highest, total = carry
        stage = lax.rem(step, jnp.int32(stages))
        low_key = (tile.first_block + step) * block_tokens

        def scored(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, q_smem, transposed(k_smem.at[stage]))
            take_turn()
            return acc[...]

        scores = pl.run_scoped(scored, plgpu.ACC(shape, jnp.float32))
        if options.quantized:
            scores = scores * refs.scales[0][0]
        scores = bounded(scores)
        plgpu.barrier_arrive(scratch["k_free"].at[stage])

        def masked(scores: jax.Array) -> jax.Array:
            position = first_position + (iota(shape, 0) & (rows - 1))
            key = low_key + iota(shape, 1)
            visible = key <= position
            if window is not None:
                visible &= key > position - window
            return jnp.where(visible, scores, -jnp.inf)

        edge = low_key + (block_tokens - 1) > tile.lowest
        if window is not None:
            edge |= low_key < tile.length - window
        scores = lax.cond(edge, masked, lambda scores: scores, scores)

        rising = jnp.maximum(highest, scores.max(axis=1) * unit)
        decay = jnp.exp2(highest - rising)
        weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(rising, shape, [0]))
        total = total * decay + weights.sum(axis=1)
        rounded = weights.astype(dtype)

        def weighted(acc: Any, left: Any) -> None:
            plgpu.wgmma(acc, left, v_smem.at[stage])

            @pl.when(step + 1 < tile.steps)
            def _() -> None:
                plgpu.barrier_wait(scratch["k_ready"].at[lax.rem(step + 1, jnp.int32(stages))])

        def tensor_core_turn() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(scratch["v_ready"].at[stage])
            plgpu.barrier_wait(turn)

        out = out * lax.broadcast_in_dim(decay, out.shape, [0])
        out, (total, rising) = add_product(
            out,
            (total, rising),
            rounded,
            weighted,
            tensor_core_turn,
            lambda: scratch["p_smem"].at[warpgroup],
            interpreted=options.interpreted,
        )
        plgpu.barrier_arrive(scratch["v_free"].at[stage])
        return out, rising, total

    empty = jnp.full((WGMMA_ROWS, head_dim), 0.0, jnp.float32)
    carry = (plgpu.layout_cast(empty, plgpu.Layout.WGMMA), row_vector(MASKED), row_vector(0.0))
    attended = lax.fori_loop(0, tile.steps, block, carry)
    pl.when(warpgroup == 0)(take_turn)
    return Attended(*attended)

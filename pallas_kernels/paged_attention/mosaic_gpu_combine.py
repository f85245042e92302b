"""The merge of the pieces of cut rows of Hopper decode, by the logarithms of their softmax sums."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import load_as, result_like, store_plain, transposed
from pallas_kernels.paged_attention.mosaic_gpu_decode_plan import (
    MASKED,
    WGMMA_ROWS,
    DecodePlan,
)

REGISTERS = 64  # of a thread, for tiles that are read at the same time
AT_ONCE = 8  # most of them


def _kernel(
    whole_gmem: Any,  # [B, groups, columns, D], of rows in one piece
    out_gmem: Any,  # float32[most_pieces, B, groups, channels, columns]
    lse_gmem: Any,  # float32[most_pieces, B, groups, columns], base 2
    pieces_gmem: Any,  # int32[B]
    merged_gmem: Any,  # [B, groups, group, D]
    staged: Any,
    passed: Any,
    landed: Any,
    *,
    plan: DecodePlan,
) -> None:
    slot, heads, tile = (lax.axis_index(name) for name in ("slot", "group", "tile"))
    pieces = pieces_gmem[slot]
    result = merged_gmem.at[slot, heads]

    @pl.when((pieces == 1) & (tile == 0))
    def _() -> None:
        plgpu.copy_gmem_to_smem(whole_gmem.at[slot, heads], passed, landed)
        plgpu.barrier_wait(landed)
        plgpu.copy_smem_to_gmem(passed.at[pl.ds(0, plan.group)], result)

    @pl.when(pieces > 1)
    def _() -> None:
        out = _merged(slot, heads, tile, pieces, out_gmem, lse_gmem, plan)
        turned = plgpu.layout_cast(out.astype(plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        store_plain(transposed(staged), turned)
        plgpu.commit_smem()
        if plan.head_dim == plan.channels:
            taken = result.at[:, pl.ds(tile * WGMMA_ROWS, WGMMA_ROWS)]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, plan.group)], taken)
            return
        for index in range(plan.channels // WGMMA_ROWS):
            low = index * WGMMA_ROWS
            held = min(WGMMA_ROWS, plan.head_dim - low)
            for head in range(plan.group):
                copy = functools.partial(
                    plgpu.copy_smem_to_gmem,
                    staged.at[head, pl.ds(0, held)],
                    result.at[head, pl.ds(low, held)],
                )
                pl.when(tile == index)(copy)

    plgpu.wait_smem_to_gmem(0)


def _merged(
    slot: jax.Array,
    heads: jax.Array,
    tile: jax.Array,
    pieces: jax.Array,
    out_gmem: Any,
    lse_gmem: Any,
    plan: DecodePlan,
) -> jax.Array:  # float32[WGMMA_ROWS, columns]
    """The pieces of one row, in their order, weighted with their shares of the softmax's sum."""
    rows = pl.ds(tile * WGMMA_ROWS, WGMMA_ROWS)
    shape = (WGMMA_ROWS, plan.columns)
    at_once = max(1, min(AT_ONCE, REGISTERS * 128 // (WGMMA_ROWS * plan.columns)))

    def row(value: float) -> jax.Array:
        held = jnp.full((plan.columns,), value, jnp.float32)
        return plgpu.layout_cast(held, plgpu.Layout.WGMMA.reduce(0))

    def merge(
        turn: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, highest, total = carry
        parts = []
        for offset in range(at_once):
            index = turn * at_once + offset
            place = jnp.minimum(index, pieces - 1)  # behind the last piece nothing was written
            lse = load_as(lse_gmem.at[place, slot, heads], plgpu.Layout.WGMMA.reduce(0))
            part = load_as(out_gmem.at[place, slot, heads, rows], plgpu.Layout.WGMMA)
            parts.append((jnp.where(index < pieces, lse, 2 * MASKED), part))
        rising = functools.reduce(jnp.maximum, [lse for lse, _ in parts], highest)
        decay = jnp.exp2(highest - rising)
        out, total = out * lax.broadcast_in_dim(decay, shape, [1]), total * decay
        for lse, part in parts:
            weight = jnp.exp2(lse - rising)
            total = total + weight
            out = out + part * lax.broadcast_in_dim(weight, shape, [1])
        return out, rising, total

    out = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    turns = lax.div(pieces + (at_once - 1), jnp.int32(at_once))
    out, _, total = lax.fori_loop(0, turns, merge, (out, row(MASKED), row(0.0)))
    return out / lax.broadcast_in_dim(total, shape, [1])


def combine(
    whole: jax.Array,  # [B, groups, columns, D]
    out: jax.Array,  # float32[most_pieces, B, groups, channels, columns]
    lse: jax.Array,  # float32[most_pieces, B, groups, columns], base 2
    pieces: jax.Array,  # int32[B]
    *,
    plan: DecodePlan,
    interpret: Any,
) -> jax.Array:  # [B, groups, group, D]
    """The pieces of cut rows, merged; the rows of one piece as they are.

    One kernel launch; the same in XLA would be several. Only what was written is read.
    """
    slots, groups = out.shape[1:3]
    dtype = np.dtype(plan.dtype)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=result_like(out, (slots, groups, plan.group, plan.head_dim), dtype),
        scratch_types=[
            plgpu.SMEM((plan.columns, WGMMA_ROWS), dtype),
            plgpu.SMEM((plan.columns, plan.head_dim), dtype),
            plgpu.Barrier(),
        ],
        grid=(slots, groups, plan.channels // WGMMA_ROWS),
        grid_names=("slot", "group", "tile"),
        kernel_name="paged_decode_combine",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(whole, out, lse, pieces)

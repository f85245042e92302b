"""The merge of the splits of the Hopper decode kernel, by the logarithms of their softmax sums."""

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
    split_of,
)

REGISTERS = 64  # of a thread, for tiles that are read at the same time


def _kernel(
    out_gmem: Any,  # float32[splits, B, groups, channels, columns]
    lse_gmem: Any,  # float32[splits, B, groups, columns], base 2
    lens_gmem: Any,  # int32[B]
    merged_gmem: Any,  # [B, groups, group, D]
    staged: Any,
    *,
    plan: DecodePlan,
) -> None:
    slot, heads, tile = (lax.axis_index(name) for name in ("slot", "group", "tile"))
    span = functools.partial(
        split_of,
        lens_gmem[slot],
        block_tokens=plan.block_tokens,
        splits=plan.splits,
        window=plan.scores.window,
    )
    rows = pl.ds(tile * WGMMA_ROWS, WGMMA_ROWS)
    shape = (WGMMA_ROWS, plan.columns)
    at_once = max(1, REGISTERS * 128 // (WGMMA_ROWS * plan.columns))

    def row(value: float) -> jax.Array:
        held = jnp.full((plan.columns,), value, jnp.float32)
        return plgpu.layout_cast(held, plgpu.Layout.WGMMA.reduce(0))

    def merge(
        first: int, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, highest, total = carry
        parts = []
        for split in range(first, min(first + at_once, plan.splits)):
            # a split without tokens has written nothing: what is there may be NaN
            used = span(jnp.int32(split)).steps > 0
            lse = load_as(lse_gmem.at[split, slot, heads], plgpu.Layout.WGMMA.reduce(0))
            part = load_as(out_gmem.at[split, slot, heads, rows], plgpu.Layout.WGMMA)
            parts.append((jnp.where(used, lse, MASKED), jnp.where(used, part, 0.0)))
        rising = functools.reduce(jnp.maximum, [lse for lse, _ in parts], highest)
        decay = jnp.exp2(highest - rising)
        out, total = out * lax.broadcast_in_dim(decay, shape, [1]), total * decay
        for lse, part in parts:
            weight = jnp.exp2(lse - rising)
            total = total + weight
            out = out + part * lax.broadcast_in_dim(weight, shape, [1])
        return out, rising, total

    out = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    carry = (out, row(MASKED), row(0.0))
    for first in range(0, plan.splits, at_once):
        carry = merge(first, carry)
    out, _, total = carry
    out = out / lax.broadcast_in_dim(total, shape, [1])
    turned = plgpu.layout_cast(out.astype(plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    store_plain(transposed(staged), turned)
    plgpu.commit_smem()
    result = merged_gmem.at[slot, heads]
    if plan.head_dim == plan.channels:
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, plan.group)], result.at[:, rows])
    else:
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


def combine(
    out: jax.Array,  # float32[splits, B, groups, channels, columns]
    lse: jax.Array,  # float32[splits, B, groups, columns], base 2
    kv_lens: jax.Array,  # int32[B]
    *,
    plan: DecodePlan,
    interpret: Any,
) -> jax.Array:  # [B, groups, group, D]
    """The outputs of the splits, weighted with their shares of the softmax's sum.

    One kernel launch; the same in XLA would be several. Splits without tokens are not looked at; a
    slot without tokens gives zeros.
    """
    slots, groups = out.shape[1:3]
    dtype = np.dtype(plan.dtype)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=result_like(out, (slots, groups, plan.group, plan.head_dim), dtype),
        scratch_types=[plgpu.SMEM((plan.columns, WGMMA_ROWS), dtype)],
        grid=(slots, groups, plan.channels // WGMMA_ROWS),
        grid_names=("slot", "group", "tile"),
        kernel_name="paged_decode_combine",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(out, lse, kv_lens)

"""Writes the output of the Hopper prefill kernel: whole tiles at once, ragged ones by rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import store_plain
from pallas_kernels.hopper.tiles import TILE_ROWS, WGMMA_ROWS, swizzle_elements
from pallas_kernels.paged_attention.hopper.prefill_plan import (
    Attended,
    Geometry,
    Options,
    Part,
    Refs,
    row_vector,
)
from pallas_kernels.paged_attention.hopper.prefill_work import WorkItem
from pallas_kernels.paged_attention.softmax import LOG2E, MASKED


def _shares(attended: Attended, part: Part, packing: Geometry, sinks: Any) -> jax.Array:
    """The factor of the weighted sums: one over the sum of weights, sinks included."""
    _, highest, total = attended
    if sinks is None:
        return 1.0 / jnp.where(total == 0.0, 1.0, total)
    rows = plgpu.Layout.WGMMA.reduce(1)
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=rows)
    head_of = lax.div(row, jnp.int32(packing.rows))
    sink = row_vector(MASKED)
    for head in range(packing.heads):
        of_head = jnp.maximum(sinks[part.first_head + head] * LOG2E, MASKED)
        sink = jnp.where(head_of == head, of_head, sink)
    top = jnp.maximum(highest, sink)
    decay = jnp.exp2(highest - top)
    return decay / (total * decay + jnp.exp2(sink - top))


def store(attended: Attended, item: WorkItem, part: Part, options: Options, refs: Refs) -> None:
    """Divides by the sums of weights and writes the rows that the tile owns."""
    packing = options.geometry
    rows, heads = packing.rows, packing.heads
    out_smem = refs.scratch["q_smem"].at[part.warpgroup]
    share = _shares(attended, part, packing, refs.sinks)
    if options.quantized:
        share = share * refs.scales[1][0]
    share = lax.broadcast_in_dim(share, attended.out.shape, [0])
    out_smem[...] = (attended.out * share).astype(out_smem.dtype)
    plgpu.commit_smem()
    low = jnp.clip(item.low - part.row_offset, 0, rows)
    high = jnp.clip(item.high - part.row_offset, 0, rows)
    first_row = pl.multiple_of(item.row + part.row_offset, TILE_ROWS)
    full = high - low == rows

    @pl.when(full)
    def _() -> None:
        for head in range(heads):
            plgpu.copy_smem_to_gmem(
                out_smem.at[pl.ds(head * rows, rows)],
                refs.out.at[pl.ds(first_row, rows), part.first_head + head],
            )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(jnp.logical_not(full) & (high > low))
    def _() -> None:
        _store_ragged(first_row, low, high, part, packing, refs)


def _store_ragged(
    first_row: jax.Array, low: jax.Array, high: jax.Array, part: Part, packing: Geometry, refs: Refs
) -> None:
    """Stores the rows [low, high) of each head: the others belong to another tile.

    Whole groups of 8 rows are copied as they are; the rows of the others one by one, from a buffer
    any row of which can be copied.
    """
    out_smem = refs.scratch["q_smem"].at[part.warpgroup]
    rows_smem = refs.scratch["rows_smem"].at[part.warpgroup]
    columns = swizzle_elements(out_smem.shape[1], out_smem.dtype)

    def for_groups(visit: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
        """Calls visit(head, first row, whether it is whole) for the groups with rows of ours."""

        def of_head(head: jax.Array, _: None) -> None:
            def group(index: jax.Array, _: None) -> None:
                first = index * TILE_ROWS
                visit(head, first, (low <= first) & (high >= first + TILE_ROWS))

            size = jnp.int32(TILE_ROWS)
            lax.fori_loop(lax.div(low, size), lax.div(high + (size - 1), size), group, None)

        lax.fori_loop(0, packing.heads, of_head, None)

    def store_whole(head: jax.Array, first: jax.Array, whole: jax.Array) -> None:
        @pl.when(whole)
        def _() -> None:
            source = pl.multiple_of(head * packing.rows + first, TILE_ROWS)
            target = pl.multiple_of(first_row + first, TILE_ROWS)
            plgpu.copy_smem_to_gmem(
                out_smem.at[pl.ds(source, TILE_ROWS)],
                refs.out.at[pl.ds(target, TILE_ROWS), part.first_head + head],
            )

    for_groups(store_whole)
    for column in range(0, out_smem.shape[1], columns):
        taken = pl.ds(column, columns)
        held = plgpu.layout_cast(out_smem[:, taken], plgpu.Layout.WGMMA)
        store_plain(rows_smem.at[:, pl.ds(0, columns)], held)
        plgpu.commit_smem()
        for_groups(
            functools.partial(_store_group, first_row, low, high, part, packing, refs, taken)
        )
        plgpu.wait_smem_to_gmem(0)


def _store_group(
    first_row: jax.Array,
    low: jax.Array,
    high: jax.Array,
    part: Part,
    packing: Geometry,
    refs: Refs,
    columns: Any,
    head: jax.Array,
    first: jax.Array,
    whole: jax.Array,
) -> None:
    """Stores some columns of those rows of a group that are ours, unless the whole group is."""
    rows_smem = refs.scratch["rows_smem"].at[part.warpgroup]

    def store_row(row: jax.Array, _: None) -> None:
        plgpu.copy_smem_to_gmem(
            rows_smem.at[pl.ds(head * packing.rows + row, 1), pl.ds(0, columns.size)],
            refs.out.at[pl.ds(first_row + row, 1), part.first_head + head, columns],
        )

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        lax.fori_loop(
            jnp.maximum(low, first), jnp.minimum(high, first + TILE_ROWS), store_row, None
        )

"""What the warpgroups of the Hopper prefill kernel do: bring keys and values, attend, store."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import transposed
from pallas_kernels.paged_attention.prefill_work import WorkItem

WARPGROUP_ROWS = 64  # the first dimension of wgmma
CONSUMERS = 2  # warpgroups that attend
ROWS_TILE = 8  # rows of one shared memory tile
LOG2E = math.log2(math.e)
LOWEST = -1e30  # below every score and finite: exp2(-inf - LOWEST) is 0, not NaN


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of the query a thread block holds.

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
    """The packing for so many query heads a KV head: as many heads as divide it and fit.

    Few rows a tile waste little at the causal edge and on short chunks; a copy needs 8 of them.
    """
    if group % 2:
        return Geometry(heads=1, rows=WARPGROUP_ROWS, split_heads=False)
    heads = math.gcd(group // 2, WARPGROUP_ROWS // ROWS_TILE)
    return Geometry(heads=heads, rows=WARPGROUP_ROWS // heads, split_heads=True)


@dataclass(frozen=True, slots=True)
class Options:
    """The static choices of one kernel."""

    scale: float
    soft_cap: float | None
    window: int | None
    sinks: bool
    geometry: Geometry
    block_tokens: int
    stages: int
    interpreted: bool


def swizzle_elements(columns: int, dtype: Any) -> int:
    bits = jnp.dtype(dtype).itemsize * 8
    return plgpu.find_swizzle(columns * bits) * 8 // bits


def tiled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The layout that TMA and wgmma share for rows of so many elements."""
    elements = swizzle_elements(columns, dtype)
    return (
        plgpu.TilingTransform((ROWS_TILE, elements)),
        plgpu.SwizzleTransform(elements * jnp.dtype(dtype).itemsize),
    )


def _row_vector(value: float) -> jax.Array:  # float32[64]
    vector = jnp.full((WARPGROUP_ROWS,), value, jnp.float32)
    return plgpu.layout_cast(vector, plgpu.Layout.WGMMA.reduce(1))


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


class Refs(NamedTuple):
    """The operands and the result in global memory; shared memory and barriers by name."""

    q: Any  # [C, H, D]
    kv: Any  # [NP, page_size, 2, KVH, D]
    table: Any  # int32[N, P]
    work: Any  # int32[T, 5]
    base: Any  # int32[1], added to every page id
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
    """What an attending warpgroup has of the tile."""

    warpgroup: jax.Array
    first_head: jax.Array
    row_offset: jax.Array  # its first row in the tile


def read_item(work: Any, index: jax.Array) -> WorkItem:
    """A row of the work table."""
    return WorkItem(*(work[index, column] for column in range(len(WorkItem._fields))))


def tile_of(item: WorkItem, options: Options) -> Tile:
    """Which keys a tile of query rows sees."""
    block = jnp.int32(options.block_tokens)
    lowest, length = item.position + item.low, item.position + item.high
    first_key = jnp.int32(0)
    if options.window is not None:
        first_key = jnp.maximum(lowest - (options.window - 1), 0)
    first_block = lax.div(first_key, block)
    steps = lax.div(length + (block - 1), block) - first_block
    return Tile(item, lowest, length, first_key, first_block, steps)


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
        for first in range(0, block_tokens, WARPGROUP_ROWS):
            for column in range(0, head_dim, columns):
                chunk = smem.at[pl.ds(first, WARPGROUP_ROWS), pl.ds(column, columns)]
                held = plgpu.layout_cast(chunk[...], plgpu.Layout.WGMMA)
                key = low_key + first + _iota(held.shape, 0)
                seen = (key >= tile.first_key) & (key < tile.length)
                chunk[...] = jnp.where(seen, held, jnp.zeros_like(held))

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


def attend(
    tile: Tile, part: Part, options: Options, refs: Refs
) -> tuple[jax.Array, jax.Array]:  # float32[64, D], float32[64]
    """Attends 64 rows: the part's rows for its first head, then for the next, and so on.

    Returns:
        The weighted sum of values and the sum of weights of each row.
    """
    heads, rows = options.geometry.heads, options.geometry.rows
    head_dim = refs.q.shape[2]
    scratch, warpgroup, first_head = refs.scratch, part.warpgroup, part.first_head
    dtype = scratch["v_smem"].dtype
    block_tokens, stages, window = options.block_tokens, options.stages, options.window
    q_smem = scratch["q_smem"].at[warpgroup]
    k_smem, v_smem, turn = scratch["k_smem"], scratch["v_smem"], scratch["turn"]
    q_ready = scratch["q_ready"].at[warpgroup]
    first_row = pl.multiple_of(tile.item.row + part.row_offset, ROWS_TILE)

    for head in range(heads):
        plgpu.copy_gmem_to_smem(
            refs.q.at[pl.ds(first_row, rows), first_head + head],
            q_smem.at[pl.ds(head * rows, rows)],
            q_ready,
        )

    highest, total = _row_vector(LOWEST), _row_vector(0.0)
    if options.sinks:
        head_of = lax.div(
            plgpu.broadcasted_iota(
                jnp.int32, (WARPGROUP_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
            ),
            jnp.int32(rows),
        )
        for head in range(heads):
            sink = jnp.maximum(refs.sinks[first_head + head] * LOG2E, LOWEST)
            highest = jnp.where(head_of == head, sink, highest)
        total = _row_vector(1.0)

    # the scale goes into the exponent's multiply-add, where nothing comes between
    folded = options.soft_cap is None and options.scale > 0
    unit = options.scale * LOG2E if folded else 1.0
    first_position = tile.item.position + part.row_offset

    def bounded(scores: jax.Array) -> jax.Array:
        if folded:
            return scores
        if options.soft_cap is None:
            return scores * (options.scale * LOG2E)
        # tanh(x) = 1 - 2 / (exp(2x) + 1); the GPU's own tanh has 11 bits
        grown = jnp.exp2(scores * (2.0 * LOG2E * options.scale / options.soft_cap))
        return (options.soft_cap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))

    shape = (WARPGROUP_ROWS, block_tokens)

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

        scores = bounded(pl.run_scoped(scored, plgpu.ACC(shape, jnp.float32)))
        plgpu.barrier_arrive(scratch["k_free"].at[stage])

        def masked(scores: jax.Array) -> jax.Array:
            position = first_position + (_iota(shape, 0) & (rows - 1))
            key = low_key + _iota(shape, 1)
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
        if options.interpreted:
            # JAX's interpreter has neither a register operand nor an initialised accumulator
            p_smem = scratch["p_smem"].at[warpgroup]
            p_smem[...] = rounded
            plgpu.commit_smem()
            tensor_core_turn()

            def added(acc: Any) -> jax.Array:
                weighted(acc, p_smem)
                return acc[...]

            accumulator = plgpu.ACC((WARPGROUP_ROWS, head_dim), jnp.float32)
            out = out + pl.run_scoped(added, accumulator)
        else:
            out, total, rising, rounded = lax.optimization_barrier((out, total, rising, rounded))
            tensor_core_turn()
            out = pl.run_state(lambda acc: weighted(acc, rounded))(plgpu.ACC.init(out))
        plgpu.barrier_arrive(scratch["v_free"].at[stage])
        return out, rising, total

    empty = jnp.full((WARPGROUP_ROWS, head_dim), 0.0, jnp.float32)
    carry = (plgpu.layout_cast(empty, plgpu.Layout.WGMMA), highest, total)
    out, _, total = lax.fori_loop(0, tile.steps, block, carry)
    pl.when(warpgroup == 0)(take_turn)

    return out, total


def store(
    out: jax.Array,  # float32[64, D]
    total: jax.Array,  # float32[64]
    item: WorkItem,
    part: Part,
    options: Options,
    refs: Refs,
) -> None:
    """Divides by the sums of weights and writes the rows that the tile owns."""
    packing = options.geometry
    rows, heads = packing.rows, packing.heads
    out_smem = refs.scratch["q_smem"].at[part.warpgroup]
    share = 1.0 / jnp.where(total == 0.0, 1.0, total)
    out_smem[...] = (out * lax.broadcast_in_dim(share, out.shape, [0])).astype(out_smem.dtype)
    plgpu.commit_smem()
    low = jnp.clip(item.low - part.row_offset, 0, rows)
    high = jnp.clip(item.high - part.row_offset, 0, rows)
    first_row = pl.multiple_of(item.row + part.row_offset, ROWS_TILE)
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
    first_row: jax.Array,
    low: jax.Array,
    high: jax.Array,
    part: Part,
    packing: Geometry,
    refs: Refs,
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
                first = index * ROWS_TILE
                visit(head, first, (low <= first) & (high >= first + ROWS_TILE))

            size = jnp.int32(ROWS_TILE)
            lax.fori_loop(lax.div(low, size), lax.div(high + (size - 1), size), group, None)

        lax.fori_loop(0, packing.heads, of_head, None)

    def store_whole(head: jax.Array, first: jax.Array, whole: jax.Array) -> None:
        @pl.when(whole)
        def _() -> None:
            source = pl.multiple_of(head * packing.rows + first, ROWS_TILE)
            target = pl.multiple_of(first_row + first, ROWS_TILE)
            plgpu.copy_smem_to_gmem(
                out_smem.at[pl.ds(source, ROWS_TILE)],
                refs.out.at[pl.ds(target, ROWS_TILE), part.first_head + head],
            )

    for_groups(store_whole)
    for column in range(0, out_smem.shape[1], columns):
        taken = pl.ds(column, columns)
        rows_smem[:, pl.ds(0, columns)] = plgpu.layout_cast(out_smem[:, taken], plgpu.Layout.WGMMA)
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
            jnp.maximum(low, first), jnp.minimum(high, first + ROWS_TILE), store_row, None
        )

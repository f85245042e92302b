"""The thread block of the Hopper decode kernel: one warp fetches pages, a warpgroup attends.

The fetching warp walks the page table and brings the keys and values of one KV head into a ring of
shared memory stages, one TMA copy for each page; keys and values have barriers of their own. The
attending warpgroup computes S^T[tokens, G] = K Q^T and O^T[head_dim, G] += V^T P^T: with the
operands in this order wgmma's 64 rows are tokens and channels, not query heads padded to 64, and
the online softmax (in base 2) touches G columns only. Its maximum over tokens crosses the warps
through shared memory; its sum stays in the thread that owns a row until the last step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import load_as, transposed
from pallas_kernels.hopper.tiles import WGMMA_ROWS, swizzle_bytes, widened
from pallas_kernels.paged_attention.hopper.decode_merge import Partials, Row, stage
from pallas_kernels.paged_attention.hopper.decode_plan import (
    HELD_FIELDS,
    Q_BUFFERS,
    THREADS,
    DecodePlan,
)
from pallas_kernels.paged_attention.hopper.decode_work import Piece, Share
from pallas_kernels.paged_attention.hopper.visible import visible_range
from pallas_kernels.paged_attention.softmax import LOG2E, MASKED


def decode_kernel(
    *operands: Any, plan: DecodePlan, interpreted: bool = False, **scratch: Any
) -> None:
    """One team's pieces for one group of query heads; there are groups = KVH * head_tiles.

    Operands: q [B, tiles, columns, D] with tiles = groups / plan.sharing, kv_pages
    [NP, page_size, 2, KVH, D], page_table int32[B, P], pieces int32[T, 8] and teams int32[teams, 3]
    of `decode_work`, first_page int32[1]; float32 sinks [tiles, columns] when plan.sinks; float32
    k_scale and v_scale [1] of 8-bit pages; where rows may be cut, zeros
    int32[B, groups], which it changes. Results: [B, groups, group, D]; where rows may be cut, also
    what `Partials` says.
    """
    inputs = iter(operands)
    q_gmem, kv_gmem, table_gmem, pieces_gmem, teams_gmem, base_gmem = (
        next(inputs) for _ in range(6)
    )
    sinks_gmem = next(inputs) if plan.sinks else None
    scales_gmem = [next(inputs), next(inputs)] if plan.quantized else []
    ended_gmem = next(inputs) if plan.most_pieces > 1 else None
    result = next(inputs)
    cut = None if ended_gmem is None else Partials(next(inputs), next(inputs), ended_gmem)

    team, group = lax.axis_index("team"), lax.axis_index("group")
    share = Share(*(teams_gmem[team, field] for field in range(len(Share._fields))))
    warpgroup = lax.axis_index("warpgroup")

    def piece_at(index: jax.Array) -> Piece:
        """A piece of the list; behind the end, the last."""
        place = jnp.minimum(index, pieces_gmem.shape[0] - 1)
        return Piece(*(pieces_gmem[place, field] for field in range(len(Piece._fields))))

    def fetch() -> None:
        kv_head = lax.div(group, jnp.int32(plan.head_tiles))
        pages = Pages(kv_gmem, table_gmem, base_gmem[0], kv_head)
        _fetch(q_gmem, group, pages, share, piece_at, plan, scratch)

    @pl.when(warpgroup == THREADS.index("fetch"))
    def _() -> None:
        # JAX cannot map warps in a shard_map that checks how references vary (check_vma)
        plgpu.warp_map(lambda warp: pl.when(warp == 0)(fetch))

    @pl.when(warpgroup == THREADS.index("attend"))
    def _() -> None:
        scales = [scale[0] for scale in scales_gmem]

        def attend(turn_number: jax.Array, carry: None) -> None:
            buffer = lax.rem(turn_number, jnp.int32(Q_BUFFERS))
            plgpu.barrier_wait(scratch["q_ready"].at[buffer])
            fields = [scratch["piece_smem"].at[buffer, j] for j in range(HELD_FIELDS)]
            held, turn = Piece(*fields[: len(Piece._fields)]), Turn(*fields[len(Piece._fields) :])
            queries = scratch["q_smem"].at[buffer]
            sink = None
            if sinks_gmem is not None:
                logits = load_as(sinks_gmem.at[plan.tile_of(group)], plgpu.Layout.WGMMA.reduce(0))
                # it takes part once
                sink = jnp.where(held.number[...] == 0, logits * LOG2E, MASKED)
            out, lse = _attend(queries, held, turn, group, sink, scales, plan, scratch)
            # read here and not before: registers are for what is attended
            row = Row(*(field[...] for field in (held.slot, turn.group, held.pieces)))
            number = held.number[...]

            @pl.when(turn_number + Q_BUFFERS < share.last - share.first)  # else no warp waits
            def _() -> None:
                plgpu.barrier_arrive(scratch["q_free"].at[buffer])

            staged = scratch["out_smem"]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # it has been read
            own = result.at[row.slot, row.group]
            if cut is None:
                stage(out, staged, plan)
                _write_result(staged, own, row.group, plan)
                return

            @pl.when(row.pieces == 1)
            def _() -> None:
                stage(out, staged, plan)

            before = scratch["ended_smem"]

            @pl.when(row.pieces > 1)
            def _() -> None:
                cut.keep(out, lse, number, row, before, interpreted=interpreted)
                pl.when(before[0] == row.pieces - 1)(lambda: cut.merge(row, staged, plan))

            @pl.when((row.pieces == 1) | (before[0] == row.pieces - 1))
            def _() -> None:
                _write_result(staged, own, row.group, plan)

        lax.fori_loop(0, share.last - share.first, attend, None)
        plgpu.wait_smem_to_gmem(0)


class Pages(NamedTuple):
    """The operands of the fetching warp besides queries."""

    kv: Any  # [NP, page_size, 2, KVH, D]
    table: Any  # int32[B, P]
    first: jax.Array  # added to every page id
    kv_head: jax.Array


class Turn(NamedTuple):
    """The place of a piece in the walk of its thread block; references to int32."""

    done: Any  # steps of the pieces before
    steps: Any  # of the walk
    group: Any  # of query heads; what is found from it here is not held in registers meanwhile


def _fetch(
    q_gmem: Any,  # [B, tiles, columns, D]
    group: jax.Array,
    pages: Pages,
    share: Share,
    piece_at: Callable[[jax.Array], Piece],
    plan: DecodePlan,
    scratch: dict[str, Any],
) -> None:
    """Fills the ring, stage after stage, as the attending warpgroup frees it.

    The ring goes on from piece to piece. Every use of a stage is one phase of each of its barriers,
    which both sides wait for exactly once and in order, so parities agree across pieces.
    """
    names = ("k_raw", "v_raw") if plan.quantized else ("k_smem", "v_smem")
    parts_of_page = plan.page_size // plan.rows

    def sources(piece: Piece, step: jax.Array) -> list[tuple[jax.Array, Any]]:
        """Page and first row of each copy of a step."""
        visible = visible_range(piece.first_key, piece.length, plan.rows)
        first = (piece.begin + step) * plan.copies
        chunks = [jnp.clip(first + j, *visible) for j in range(plan.copies)]
        table = pages.table.at[piece.slot]
        if parts_of_page == 1:
            return [(table[chunk] + pages.first, 0) for chunk in chunks]
        parts = jnp.int32(parts_of_page)
        return [
            (table[lax.div(chunk, parts)] + pages.first, lax.rem(chunk, parts) * plan.rows)
            for chunk in chunks
        ]

    def fetch_piece(index: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        done, piece, following, found = carry
        # read a piece ahead: its first pages answer from memory while this one's are copied
        first_of_following = sources(following, jnp.int32(0))
        after = piece_at(index + 2)
        turn = index - share.first
        buffer = lax.rem(turn, jnp.int32(Q_BUFFERS))

        @pl.when(turn >= Q_BUFFERS)
        def _() -> None:
            plgpu.barrier_wait(scratch["q_free"].at[buffer])

        for field, value in enumerate((*piece, done, share.steps, group)):
            scratch["piece_smem"][buffer, field] = value
        plgpu.barrier_arrive(scratch["q_ready"].at[buffer])
        plgpu.copy_gmem_to_smem(
            q_gmem.at[piece.slot, plan.tile_of(group)],
            scratch["q_smem"].at[buffer],
            scratch["q_ready"].at[buffer],
        )

        def fill(step: jax.Array, found: list[tuple[jax.Array, Any]]) -> list[Any]:
            use = done + step
            stage = lax.rem(use, jnp.int32(plan.stages))
            # read early: the page table answers from memory while this step waits
            following = sources(piece, step + 1)
            for part, (name, kind) in enumerate(zip(names, "kv")):
                free = scratch[f"{kind}_free"].at[stage]
                pl.when(use >= plan.stages)(functools.partial(plgpu.barrier_wait, free))
                rows = plan.value_rows if kind == "v" else plan.rows
                target = scratch[name].at[stage]
                if target.shape[1] > plan.head_dim:
                    target = target.at[:, pl.ds(0, plan.head_dim)]
                for j, (page, row) in enumerate(found):
                    for low in range(0, plan.rows, rows):
                        plgpu.copy_gmem_to_smem(
                            pages.kv.at[page, pl.ds(row + low, rows), part, pages.kv_head],
                            target.at[pl.ds(j * plan.rows + low, rows)],
                            scratch[f"{kind}_ready"].at[stage],
                        )
            return following

        lax.fori_loop(0, piece.steps, fill, found)
        return done + piece.steps, following, after, first_of_following

    first = piece_at(share.first)
    carry = (jnp.int32(0), first, piece_at(share.first + 1), sources(first, jnp.int32(0)))
    lax.fori_loop(share.first, share.last, fetch_piece, carry)


def _ends(held: Piece, group: jax.Array, plan: DecodePlan) -> jax.Array:
    """The end of the keys that each column's query sees, int32[columns]; 0 for no query."""
    column = plgpu.broadcasted_iota(
        jnp.int32, (plan.columns,), 0, layout=plgpu.Layout.WGMMA.reduce(0)
    )
    tile = lax.rem(group, jnp.int32(plan.head_tiles))
    head = tile * plan.group + column - plan.first_column(group)
    query = lax.div(head, jnp.int32(plan.heads))
    length, queries = held.length[...], held.queries[...]
    return jnp.where(query < queries, length - queries + query + 1, 0)


def _attend(
    queries: Any,  # [columns, D]
    held: Piece,  # references; read where they are needed, for registers are scarce
    turn: Turn,
    group: jax.Array,
    sink: jax.Array | None,  # float32[columns], base 2
    scales: list[jax.Array],  # of keys and of values, or nothing
    plan: DecodePlan,
    scratch: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """The output [channels, columns] and log2 of the softmax's sum [columns] of a piece."""
    shape, out_shape = (plan.block_tokens, plan.columns), (plan.channels, plan.columns)
    factor = jnp.float32(plan.scores.scale * (LOG2E if plan.scores.soft_cap is None else 1.0))
    if scales:
        factor = factor * scales[0]
    ends = _ends(held, group, plan) if plan.queries > 1 else None

    def visible(token: jax.Array, low_key: jax.Array) -> jax.Array:
        """A mask of the tokens of a step that each column sees."""
        if ends is None:
            first_key, length = held.first_key[...], held.length[...]
            return (token >= first_key - low_key) & (token < length - low_key)
        end = lax.broadcast_in_dim(ends - low_key, shape, [1])
        if plan.scores.window is None:
            return token < end
        return (token < end) & (token >= end - plan.scores.window)

    def attend(
        step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, highest, total = carry
        use = turn.done[...] + step
        stage = lax.rem(use, jnp.int32(plan.stages))
        low_key = (held.begin[...] + step) * plan.block_tokens

        def free(kind: str) -> None:
            @pl.when(use + plan.stages < turn.steps[...])  # else no warp waits for the stage
            def _() -> None:
                plgpu.barrier_arrive(scratch[f"{kind}_free"].at[stage])

        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        seen = visible(token, low_key)

        plgpu.barrier_wait(scratch["k_ready"].at[stage])
        keys = scratch["k_smem"].at[stage]
        if plan.quantized:
            keys = scratch["k_smem"].at[0]
            _widen(scratch["k_raw"].at[stage], keys, plan)
            plgpu.commit_smem()  # of the numbers as read, too: TMA is to write there next
            free("k")
        scores = _product(keys, transposed(queries), shape)
        if not plan.quantized:
            free("k")

        scores = scores * factor
        if plan.scores.soft_cap is not None:
            scores = _soft_capped(scores, plan.scores.soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        rising = jnp.maximum(highest, scores.max(axis=0))
        decay = jnp.exp2(highest - rising)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(rising, shape, [1]))
        total = total * lax.broadcast_in_dim(decay, shape, [1]) + weights
        transposed(scratch["p_smem"])[...] = plgpu.layout_cast(
            weights.astype(plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )

        plgpu.barrier_wait(scratch["v_ready"].at[stage])
        values = scratch["v_smem"].at[stage]
        if plan.quantized:
            values = scratch["v_smem"].at[0]
            _widen(scratch["v_raw"].at[stage], values.at[:, pl.ds(0, plan.head_dim)], plan)
        if plan.pool_dtype != jnp.int8:
            first_key, length = held.first_key[...], held.length[...]

            @pl.when((low_key < first_key) | (low_key + plan.block_tokens > length))
            def _() -> None:
                # a masked value may hold anything, NaN too, and a weight of 0 * NaN is NaN
                for low in range(0, plan.channels, WGMMA_ROWS):
                    some = values.at[:, pl.ds(low, WGMMA_ROWS)]
                    number = load_as(some, plgpu.Layout.WGMMA, optimized=True)
                    row = plgpu.broadcasted_iota(
                        jnp.int32, number.shape, 0, layout=plgpu.Layout.WGMMA
                    )
                    kept = (row >= first_key - low_key) & (row < length - low_key)
                    some[...] = jnp.where(kept, number, jnp.zeros_like(number))

        plgpu.commit_smem()
        if plan.quantized:
            free("v")
        part = _product(transposed(values), transposed(scratch["p_smem"]), out_shape)
        if not plan.quantized:
            free("v")
        return out * lax.broadcast_in_dim(decay, out_shape, [1]) + part, rising, total

    def zeros(shape: tuple[int, int]) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    highest = sink
    if highest is None:
        highest = plgpu.layout_cast(
            jnp.full((plan.columns,), MASKED, jnp.float32), plgpu.Layout.WGMMA.reduce(0)
        )
    carry = (zeros(out_shape), highest, zeros(shape))
    out, highest, total = lax.fori_loop(0, held.steps[...], attend, carry)
    whole = total.sum(axis=0)
    if sink is not None:
        whole = whole + jnp.exp2(sink - highest)
    whole = jnp.where(whole > 0.0, whole, 1.0)
    inverse = (scales[1] if scales else 1.0) / whole
    if ends is not None:
        # a query that sees nothing here has weighted masked values
        inverse = jnp.where(highest > MASKED / 2, inverse, 0.0)
    return out * lax.broadcast_in_dim(inverse, out_shape, [1]), highest + jnp.log2(whole)


def _product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """float32 a @ b of two references to shared memory; complete when it returns."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _soft_capped(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap), times log2(e)."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1): exact to float32, at one exponential and one division
    power = jnp.exp2(scores * (2.0 * LOG2E / cap))
    return cap * LOG2E - (2.0 * cap * LOG2E) / (power + 1.0)


def _widen(raw: Any, wide: Any, plan: DecodePlan) -> None:
    """Copies 8-bit numbers to a reference of the type that is multiplied; not committed."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    held = load_as(raw, layout, optimized=swizzle_bytes(plan.head_dim, plan.pool_dtype) is not None)
    wide[...] = widened(held, plan.dtype)


def _write_result(staged: Any, result: Any, group: jax.Array, plan: DecodePlan) -> None:
    """The group's own columns to result [group, D]; returns before they are there."""
    plgpu.commit_smem()
    first = plan.first_column(group)
    if plan.head_dim == plan.channels:
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(first, plan.group)], result)
        return
    for head in range(plan.group):
        own = staged.at[first + head, pl.ds(0, plan.head_dim)]
        plgpu.copy_smem_to_gmem(own, result.at[head])

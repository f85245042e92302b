"""Paged prefill attention for NVIDIA Hopper in Pallas Mosaic GPU.

The shape is FlashAttention-3's (Shah et al., "FlashAttention-3: Fast and Accurate Attention with
Asynchrony and Low-precision", 2024), against pages. A thread block holds a tile of query rows of
one lane for some query heads of one KV head, packed into the 2 x 64 rows of two warpgroups that
attend; a third warpgroup walks the lane's page table and brings keys and values into a ring in
shared memory, one strided TMA copy a page. The two attending warpgroups take turns at the tensor
core: while one multiplies, the other computes its softmax. Blocks of keys that no row may see are
not visited, and only those at the causal or window edge are masked.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import coverage
from pallas_kernels.compat import result_like, transposed
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import prefill_work
from pallas_kernels.tuning import PrefillTuning

WARPGROUP_ROWS = 64  # the first dimension of wgmma
CONSUMERS = 2
PRODUCER = CONSUMERS  # the warpgroup after the attending ones
ROWS_TILE = 8  # rows of one shared memory tile
BLOCK_TOKENS = (64, 128)
DEFAULT = PrefillTuning(block_tokens=128, stages=4)
LOG2E = math.log2(math.e)
LOWEST = -1e30  # below every score and finite: exp2(-inf - LOWEST) is 0, not NaN
SHARED_MEMORY = 232448  # bytes that a thread block of compute capability 9.0 may ask for
RESERVED = 4096  # of these, for barriers and the reductions of Mosaic
# of 65536 registers: 2 * 128 * 232 + 128 * 40
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


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


def _swizzle_elements(columns: int, dtype: Any) -> int:
    bits = jnp.dtype(dtype).itemsize * 8
    return plgpu.find_swizzle(columns * bits) * 8 // bits


def _tiled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The layout that TMA and wgmma share for rows of so many elements."""
    elements = _swizzle_elements(columns, dtype)
    return (
        plgpu.TilingTransform((ROWS_TILE, elements)),
        plgpu.SwizzleTransform(elements * jnp.dtype(dtype).itemsize),
    )


def _row_vector(value: float) -> jax.Array:  # float32[64]
    vector = jnp.full((WARPGROUP_ROWS,), value, jnp.float32)
    return plgpu.layout_cast(vector, plgpu.Layout.WGMMA.reduce(1))


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _stored_columns(head_dim: int) -> int:
    """Columns of a ragged tile that are stored at once, through a plain buffer."""
    return 64 if head_dim % 64 == 0 else head_dim


def _pitch(columns: int) -> int:
    """Elements from one row of the plain buffer to the next: a copy begins at 128 bytes."""
    return -(-columns // 64) * 64


def shared_bytes(head_dim: int, block_tokens: int, stages: int) -> int:
    """Shared memory of the compiled kernel, 16-bit elements throughout."""
    elements = CONSUMERS * WARPGROUP_ROWS * (head_dim + _pitch(_stored_columns(head_dim)))
    return 2 * (elements + 2 * stages * block_tokens * head_dim) + RESERVED


def fitted(tuning: PrefillTuning, head_dim: int) -> tuple[int, int]:
    """Keys a block and stages: those wanted, fewer where shared memory would not hold them."""
    block_tokens, stages = tuning.block_tokens, tuning.stages
    while shared_bytes(head_dim, block_tokens, 2) > SHARED_MEMORY:
        block_tokens //= 2
    while shared_bytes(head_dim, block_tokens, stages) > SHARED_MEMORY:
        stages -= 1
    return block_tokens, stages


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


class _Tile:
    """The scalars of one thread block's work, read by every thread."""

    def __init__(self, work_gmem: Any, item: jax.Array, options: Options):
        self.lane, self.row, self.low, self.high, self.position = (
            work_gmem[item, column] for column in range(len(prefill_work.WorkItem._fields))
        )
        window, block = options.window, jnp.int32(options.block_tokens)
        self.lowest = self.position + self.low  # position of the first row that is attended
        self.length = self.position + self.high  # keys up to the last row's own
        self.first_key = (
            jnp.int32(0) if window is None else jnp.maximum(self.lowest - (window - 1), 0)
        )
        self.first_block = lax.div(self.first_key, block)
        self.steps = lax.div(self.length + (block - 1), block) - self.first_block


def _produce(
    tile: _Tile,
    kv_head: jax.Array,
    options: Options,
    kv_gmem: Any,
    table_gmem: Any,
    base_gmem: Any,
    scratch: Any,
) -> None:
    """Brings the tile's blocks of keys and values into the ring, in order."""
    page_size, _, _, head_dim = kv_gmem.shape[1:]
    block_tokens, stages = options.block_tokens, options.stages
    piece = min(page_size, block_tokens)
    pieces = block_tokens // piece
    k_smem, v_smem = scratch["k_smem"], scratch["v_smem"]
    first_page = base_gmem[0]
    lowest_page = lax.div(tile.first_key, jnp.int32(page_size))
    highest_page = jnp.maximum(
        lax.div(tile.length + (page_size - 1), jnp.int32(page_size)) - 1, 0
    )

    def page_ids(step: jax.Array) -> tuple[jax.Array, ...]:
        # pages outside the visible range may be anybody's: the nearest visible one is read twice
        token = (tile.first_block + step) * block_tokens
        pages = [lax.div(token + j * piece, jnp.int32(page_size)) for j in range(pieces)]
        return tuple(
            table_gmem[tile.lane, jnp.clip(page, lowest_page, highest_page)] + first_page
            for page in pages
        )

    def fetch(
        low_key: jax.Array, ids: tuple[jax.Array, ...], part: int, smem: Any, ready: Any
    ) -> None:
        offset = 0
        if piece < page_size:
            offset = pl.multiple_of(lax.rem(low_key, jnp.int32(page_size)), piece)
        for j, page in enumerate(ids):
            plgpu.copy_gmem_to_smem(
                kv_gmem.at[page, pl.ds(offset, piece), part, kv_head],
                smem.at[pl.ds(j * piece, piece)],
                ready,
            )

    def clear_invisible(smem: Any, low_key: jax.Array) -> None:
        """Zeros for the values that no row may see: a weight of 0 * NaN would be NaN."""
        columns = _swizzle_elements(head_dim, smem.dtype)
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


def _attend(
    tile: _Tile,
    first_head: jax.Array,
    row_offset: jax.Array,
    warpgroup: jax.Array,
    options: Options,
    q_gmem: Any,
    sinks_gmem: Any,
    out_gmem: Any,
    scratch: Any,
) -> None:
    """Attends 64 rows: query rows [row_offset, +rows) of the tile for each of some heads."""
    heads, rows = options.geometry.heads, options.geometry.rows
    head_dim = q_gmem.shape[2]
    dtype = scratch["v_smem"].dtype
    block_tokens, stages, window = options.block_tokens, options.stages, options.window
    q_smem = scratch["q_smem"].at[warpgroup]
    k_smem, v_smem, turn = scratch["k_smem"], scratch["v_smem"], scratch["turn"]
    q_ready = scratch["q_ready"].at[warpgroup]
    first_row = pl.multiple_of(tile.row + row_offset, ROWS_TILE)

    for head in range(heads):
        plgpu.copy_gmem_to_smem(
            q_gmem.at[pl.ds(first_row, rows), first_head + head],
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
            sink = jnp.maximum(sinks_gmem[first_head + head] * LOG2E, LOWEST)
            highest = jnp.where(head_of == head, sink, highest)
        total = _row_vector(1.0)

    # the scale goes into the exponent's multiply-add, where nothing comes between
    folded = options.soft_cap is None and options.scale > 0
    unit = options.scale * LOG2E if folded else 1.0
    first_position = tile.position + row_offset

    def bounded(scores: jax.Array) -> jax.Array:
        if folded:
            return scores
        if options.soft_cap is None:
            return scores * (options.scale * LOG2E)
        # tanh(x) = 1 - 2 / (exp(2x) + 1); the GPU's own tanh has 11 bits
        grown = jnp.exp2(scores * (2.0 * LOG2E * options.scale / options.soft_cap))
        return (options.soft_cap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))

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

        shape = (WARPGROUP_ROWS, block_tokens)
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

            out = out + pl.run_scoped(added, plgpu.ACC(out.shape, jnp.float32))
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

    share = 1.0 / jnp.where(total == 0.0, 1.0, total)
    q_smem[...] = (out * lax.broadcast_in_dim(share, out.shape, [0])).astype(q_smem.dtype)
    plgpu.commit_smem()
    low = jnp.clip(tile.low - row_offset, 0, rows)
    high = jnp.clip(tile.high - row_offset, 0, rows)
    full = high - low == rows

    @pl.when(full)
    def _() -> None:
        for head in range(heads):
            plgpu.copy_smem_to_gmem(
                q_smem.at[pl.ds(head * rows, rows)],
                out_gmem.at[pl.ds(first_row, rows), first_head + head],
            )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(jnp.logical_not(full))
    def _() -> None:
        rows_smem = scratch["rows_smem"].at[warpgroup]
        _store_ragged(
            q_smem, rows_smem, out_gmem, first_row, first_head, low, high, options.geometry
        )


def _store_ragged(
    out_smem: Any,  # [64, D], tiled
    rows_smem: Any,  # [64, columns and padding], plain: any row of it can be copied
    out_gmem: Any,  # [C, H, D]
    first_row: jax.Array,
    first_head: jax.Array,
    low: jax.Array,
    high: jax.Array,
    packing: Geometry,
) -> None:
    """Stores the rows [low, high) of each head: the others belong to another tile.

    Whole groups of 8 rows are copied as they are, the rows of the others one by one.
    """
    head_dim = out_smem.shape[1]
    columns = _stored_columns(head_dim)
    groups = [
        (head, group, (low <= group) & (high >= group + ROWS_TILE))
        for head in range(packing.heads)
        for group in range(0, packing.rows, ROWS_TILE)
    ]
    for head, group, whole in groups:

        @pl.when(whole)
        def _(head: int = head, group: int = group) -> None:
            plgpu.copy_smem_to_gmem(
                out_smem.at[pl.ds(head * packing.rows + group, ROWS_TILE)],
                out_gmem.at[
                    pl.ds(pl.multiple_of(first_row + group, ROWS_TILE), ROWS_TILE),
                    first_head + head,
                ],
            )

    for column in range(0, head_dim, columns):
        held = plgpu.layout_cast(out_smem[:, pl.ds(column, columns)], plgpu.Layout.WGMMA)
        rows_smem[:, pl.ds(0, columns)] = held
        plgpu.commit_smem()
        for head, group, whole in groups:

            @pl.when(jnp.logical_not(whole))
            def _(head: int = head, group: int = group, column: int = column) -> None:
                def store(row: jax.Array, _: None) -> None:
                    plgpu.copy_smem_to_gmem(
                        rows_smem.at[head * packing.rows + row, pl.ds(0, columns)],
                        out_gmem.at[first_row + row, first_head + head, pl.ds(column, columns)],
                    )

                lax.fori_loop(
                    jnp.maximum(low, group), jnp.minimum(high, group + ROWS_TILE), store, None
                )

        plgpu.wait_smem_to_gmem(0)


def _kernel(*refs: Any, options: Options, kv_heads: int, **scratch: Any) -> None:
    q_gmem, kv_gmem, table_gmem, work_gmem, base_gmem, *optional, out_gmem = refs
    sinks_gmem = optional[0] if options.sinks else None
    block, item, warpgroup = (lax.axis_index(name) for name in ("heads", "item", "warpgroup"))
    packing = options.geometry
    tile = _Tile(work_gmem, item, options)
    owns_rows = tile.high > tile.low
    first_head = block * packing.tile_heads
    kv_head = lax.div(first_head, jnp.int32(q_gmem.shape[1] // kv_heads))

    @pl.when(owns_rows & (warpgroup < CONSUMERS))
    def _() -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        heads_before = warpgroup * packing.heads if packing.split_heads else 0
        rows_before = jnp.int32(0) if packing.split_heads else warpgroup * packing.rows
        _attend(
            tile, first_head + heads_before, rows_before, warpgroup, options,
            q_gmem, sinks_gmem, out_gmem, scratch,
        )  # fmt: skip

    @pl.when(owns_rows & (warpgroup == PRODUCER))
    def _() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(tile, kv_head, options, kv_gmem, table_gmem, base_gmem, scratch)


def _scratch(head_dim: int, page_size: int, dtype: Any, options: Options) -> dict[str, Any]:
    """Shared memory and barriers of a thread block."""
    block_tokens, stages = options.block_tokens, options.stages
    tiles = _tiled(head_dim, dtype)
    ring = (stages, block_tokens, head_dim)
    copies = block_tokens // min(page_size, block_tokens)
    scratch = {
        # the queries, later the output
        "q_smem": plgpu.SMEM((CONSUMERS, WARPGROUP_ROWS, head_dim), dtype, transforms=tiles),
        "k_smem": plgpu.SMEM(ring, dtype, transforms=tiles),
        "v_smem": plgpu.SMEM(ring, dtype, transforms=tiles),
        "rows_smem": plgpu.SMEM(
            (CONSUMERS, WARPGROUP_ROWS, _pitch(_stored_columns(head_dim))), dtype
        ),
        "q_ready": plgpu.Barrier(num_arrivals=options.geometry.heads, num_barriers=CONSUMERS),
        "k_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v_landed": plgpu.Barrier(num_arrivals=copies),
        "k_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "turn": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    if options.interpreted:
        scratch["p_smem"] = plgpu.SMEM((CONSUMERS, WARPGROUP_ROWS, block_tokens), dtype)
    return scratch


@functools.partial(
    jax.jit, static_argnames=("scale", "soft_cap", "window", "tuning", "interpret")
)
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    start: jax.Array,  # int32[N]
    length: jax.Array,  # int32[N]
    context: jax.Array,  # int32[N]
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,  # float32[H]
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    first_page: jax.Array,  # int32[]
    tuning: PrefillTuning | None,
    interpret: Any,
) -> jax.Array:  # [C, H, D]
    """Causal attention of packed chunks on an NVIDIA Hopper GPU.

    Softmax weights are rounded to the type of the pages before they are multiplied with the
    values; scores, maxima, sums and outputs before the last rounding are float32.

    Args:
        tuning: block_tokens and stages are upper bounds, as far as shared memory goes; None takes
            those that suit the head size.
        interpret: parameters of JAX's Mosaic GPU interpreter; None compiles for the GPU.

    Raises:
        KernelError: the kernel does not cover the shapes, types or tuning; names them.
    """
    coverage.require(
        coverage.mosaic_gpu_prefill(coverage.AttentionShape.of(q, kv_pages)),
        "mosaic_gpu",
        q,
        kv_pages,
    )
    region, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[3]
    packing = geometry(heads // kv_heads)
    block_tokens, stages = fitted(_checked(tuning, kv_pages.shape[1]), head_dim)
    options = Options(
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks is not None,
        geometry=packing,
        block_tokens=block_tokens,
        stages=stages,
        interpreted=interpret is not None,
    )
    # a copy of a tile's queries lies inside the region and begins at a multiple of 8 rows
    padded = max(-(-region // ROWS_TILE) * ROWS_TILE, packing.tile_rows)
    q = jnp.pad(q, ((0, padded - region), (0, 0), (0, 0)))
    work = prefill_work.divide(
        start, length, context, region=padded, tile_rows=packing.tile_rows
    )
    operands = [q, kv_pages, page_table, work, first_page.reshape(1)]
    if sinks is not None:
        operands.append(sinks)
    out = plgpu.kernel(
        functools.partial(_kernel, options=options, kv_heads=kv_heads),
        out_type=[result_like(q, q.shape, q.dtype)],
        scratch_types=_scratch(head_dim, kv_pages.shape[1], q.dtype, options),
        grid=(heads // packing.tile_heads, work.shape[0]),
        grid_names=("heads", "item"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(*operands)[0]
    return out[:region]


def _checked(tuning: PrefillTuning | None, page_size: int) -> PrefillTuning:
    """The tuning of the kernel.

    Raises:
        KernelError: a field has a value that the kernel cannot take.
    """
    if tuning is None:
        return DEFAULT
    if tuning.block_tokens not in BLOCK_TOKENS:
        raise KernelError("tuning.block_tokens", tuning.block_tokens, "64 or 128")
    if tuning.stages < 2:
        raise KernelError("tuning.stages", tuning.stages, "at least 2")
    if tuning.consumers != CONSUMERS or tuning.tile_rows != CONSUMERS * WARPGROUP_ROWS:
        raise KernelError(
            "tuning",
            tuning,
            f"consumers={CONSUMERS} and tile_rows={CONSUMERS * WARPGROUP_ROWS}",
        )
    return tuning

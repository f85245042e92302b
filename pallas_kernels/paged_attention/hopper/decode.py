"""Paged decode attention for NVIDIA Hopper in Pallas Mosaic GPU.

A row is cut into pieces of bounded length (`decode_work`); persistent thread blocks attend them
for the query heads of one KV head, one after another (`decode_kernel`). Of a row in one
piece they write the result; the pieces of the others are merged by the logarithms of their softmax
sums (Dao et al., "Flash-Decoding for long-context inference", 2023) by the thread block that ends
the last of them (`decode_merge`). The queries of a row read the same keys, so they are further
heads of their KV head.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import interpreter
from pallas_kernels.backends.mosaic_gpu import HopperDecodeTuning
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.hopper.tiles import TILE_ROWS, WGMMA_ROWS
from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.paged_attention.hopper.decode_kernel import decode_kernel
from pallas_kernels.paged_attention.hopper.decode_plan import Q_BUFFERS, THREADS, DecodePlan
from pallas_kernels.paged_attention.hopper.decode_work import Batch, Cut, Work, divide
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.queries import as_heads, as_queries
from pallas_kernels.pages import compute_dtype

MAX_SPLITS = 64
PIECE_BYTES = 2**18  # of keys and values in one KV head, where there are KV_HEADS of them
KV_HEADS = 8
LEAST_STEPS = 4  # of a piece: partial results are a thirtieth of its bytes
CUT_THREAD_BLOCKS = 128  # that the pieces of one long row give work to: one a multiprocessor
MAX_STAGES = 4  # of a ring when nothing is given: more has nothing left to hide
# a thread has registers for 128 channels of 64 query heads, or 256 of 32
WIDE_CHANNELS, WIDE_COLUMNS, MAX_COLUMNS = 128, 32, 64
BLOCK_MEMORY = 231_424  # bytes of shared memory of a multiprocessor; half of it twice fits too


def stages_within(
    memory: int, block_tokens: int, head_dim: int, group: int, pool_dtype: DTypeLike
) -> int:
    """The stages of keys and values that fit into so many bytes of shared memory; 0 for none."""
    size = jnp.dtype(pool_dtype).itemsize
    channels = -(-head_dim // WGMMA_ROWS) * WGMMA_ROWS
    columns = -(-group // TILE_ROWS) * TILE_ROWS
    stage = block_tokens * (head_dim + (channels if size == 2 else head_dim)) * size
    widened = 0 if size == 2 else block_tokens * (head_dim + channels) * 2
    # queries, weights and result; barriers, scales and what crosses the warps
    others = 2 * columns * (Q_BUFFERS * head_dim + block_tokens + channels) + 4096
    return max(0, (memory - widened - others) // stage)


def default_tuning(head_dim: int, group: int, pool_dtype: DTypeLike) -> HopperDecodeTuning:
    """The kernel's default tuning for a shape; by reasoning, not by measurement.

    Small keys are taken 128 at a time, so that more of them share the cost of a step; not with 16
    columns, whose scores would take more than the registers of two thread blocks (compiled: 142).
    The ring is as deep, up to 4, as lets two thread blocks live on one multiprocessor: each attends
    while the other waits. Where not even two stages fit twice, one thread block has the
    multiprocessor.
    """
    small = jnp.dtype(pool_dtype).itemsize == 2 and head_dim <= WGMMA_ROWS
    small = small and not TILE_ROWS < group <= 2 * TILE_ROWS
    block_tokens = 2 * WGMMA_ROWS if small else WGMMA_ROWS
    stages = stages_within(BLOCK_MEMORY // 2, block_tokens, head_dim, group, pool_dtype)
    if stages < 2:
        stages = stages_within(BLOCK_MEMORY, block_tokens, head_dim, group, pool_dtype)
    return HopperDecodeTuning(block_tokens=block_tokens, stages=min(stages, MAX_STAGES))


def cut_of(
    block_tokens: int, head_dim: int, pool_dtype: DTypeLike, groups: int, splits: int | None = None
) -> Cut:
    """The cuts of rows: by the sizes of a token alone, not by the batch or the page table.

    Pieces of all KV heads together have a certain size; a row has no more of them than give a
    thread block to every multiprocessor, so partial results stay small beside keys and values.

    Args:
        splits: into which every row is divided, as far as it has steps; None chooses.
    """
    if splits is not None:
        return Cut(block_tokens, 1, splits)
    step = 2 * block_tokens * head_dim * jnp.dtype(pool_dtype).itemsize
    steps = max(LEAST_STEPS, PIECE_BYTES * groups // (KV_HEADS * step))
    return Cut(block_tokens, steps, max(4, CUT_THREAD_BLOCKS // groups))


def thread_blocks(
    head_dim: int, group: int, pool_dtype: DTypeLike, tuning: HopperDecodeTuning
) -> int:
    """Thread blocks that the chip holds at once, up to the waves that are wanted."""
    twice = fits_twice(head_dim, group, pool_dtype, tuning)
    return multiprocessors() * (tuning.waves if twice else 1)


def fits_twice(
    head_dim: int, group: int, pool_dtype: DTypeLike, tuning: HopperDecodeTuning
) -> bool:
    """Whether a multiprocessor has memory and registers for two thread blocks; proofs hold it."""
    columns = -(-group // TILE_ROWS) * TILE_ROWS
    fitting = stages_within(BLOCK_MEMORY // 2, tuning.block_tokens, head_dim, group, pool_dtype)
    # more columns take more than the 128 registers a thread that two thread blocks have
    most = 2 * TILE_ROWS if jnp.dtype(pool_dtype).itemsize == 2 else TILE_ROWS
    return fitting >= tuning.stages and columns <= most


def tiles_of(queries: int, heads: int, head_dim: int) -> tuple[int, int]:
    """Into how many groups the heads of a KV head are divided, and the heads of a group.

    Args:
        queries: of a row, at most; each has heads of its own.
        heads: query heads of a KV head.
    """
    wide = head_dim > WIDE_CHANNELS or queries > 1
    tiles = -(-queries * heads // (WIDE_COLUMNS if wide else MAX_COLUMNS))
    return tiles, -(-queries * heads // tiles)


def sharing_of(group: int, groups: int) -> int:
    """The groups of query heads that fill a tile of columns; 1 where none fill it exactly.

    The heads of a tile lie side by side, so that the queries need not be copied to fill it.
    """
    together = max(1, TILE_ROWS // group)
    return together if together * group == TILE_ROWS and groups % together == 0 else 1


def _check_tuning(
    tuning: HopperDecodeTuning, head_dim: int, group: int, pool_dtype: DTypeLike
) -> None:
    if tuning.block_tokens not in (WGMMA_ROWS, 2 * WGMMA_ROWS):
        raise KernelError("tuning.block_tokens", tuning.block_tokens, "64 or 128")
    most = stages_within(BLOCK_MEMORY, tuning.block_tokens, head_dim, group, pool_dtype)
    if not 2 <= tuning.stages <= most:
        raise KernelError(
            "tuning.stages", tuning.stages, f"2 to {most} of {tuning.block_tokens} tokens each"
        )


def decode(
    q: jax.Array,  # [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    splits: int | None,
    tuning: HopperDecodeTuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [B, Q, H, D]
    """Attention of the last 1 to 8 tokens of each slot on an NVIDIA Hopper GPU.

    A row's result is the same, bit for bit, whatever other rows are in the batch. Softmax weights
    are rounded to the type of the pages (of the queries for 8-bit pages) before they are multiplied
    with the values; scores, maxima, sums and partial outputs are float32.

    Args:
        tuning: None chooses by the shape; see default_tuning.
        interpret: parameters of JAX's Mosaic GPU interpreter; None compiles for the GPU.

    Raises:
        KernelError: the kernel does not cover the shapes, the types or the tuning; names them.
    """
    page_size, _, kv_heads, head_dim = kv_pages.shape[1:]
    queries, heads = q.shape[1], q.shape[2] // kv_heads
    head_tiles, group = tiles_of(queries, heads, head_dim)
    tuning = tuning or default_tuning(head_dim, group, kv_pages.dtype)
    _check_tuning(tuning, head_dim, group, kv_pages.dtype)
    if splits is not None and splits > MAX_SPLITS:
        raise KernelError("splits", splits, f"at most {MAX_SPLITS}")
    # as many heads as a KV head has share its cut: its tiles read the same keys
    cut = cut_of(tuning.block_tokens, head_dim, kv_pages.dtype, kv_heads, splits)
    tokens = page_table.shape[1] * page_size
    if options.scores.window is not None:
        tokens = min(tokens, options.scores.window + queries - 1)
    plan = DecodePlan(
        group=group,
        head_tiles=head_tiles,
        sharing=sharing_of(group, kv_heads * head_tiles),
        queries=queries,
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        block_tokens=tuning.block_tokens,
        stages=tuning.stages,
        most_pieces=cut.most_pieces(tokens),
        pool_dtype=jnp.dtype(kv_pages.dtype),
        dtype=compute_dtype(kv_pages.dtype, q.dtype),
        scores=options.scores,
        sinks=options.sinks is not None,
    )
    blocks = thread_blocks(head_dim, group, kv_pages.dtype, tuning)
    teams = max(1, min(blocks // (kv_heads * head_tiles), q.shape[0] * plan.most_pieces))
    batch = Batch(
        slots=q.shape[0],
        queries=queries,
        window=options.scores.window,
        # the list has room for what the page table reaches
        tokens=page_table.shape[1] * page_size,
        cut=cut,
    )
    work = divide(
        kv_lens,
        options.query_lens,
        batch,
        most_pieces=plan.most_pieces,
        teams=teams,
        interpret=interpret,
    )
    out = _attend(
        as_heads(q, kv_heads), kv_pages, page_table, work, options, plan=plan, interpret=interpret
    )
    return as_queries(out, queries, kv_heads)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _attend(
    q: jax.Array,  # [B, Q * H, D], of `as_heads`
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    work: Work,
    options: AttentionOptions,
    *,
    plan: DecodePlan,
    interpret: Any,
) -> jax.Array:  # [B, Q * H, D]
    sinks, k_scale, v_scale = options.sinks, options.k_scale, options.v_scale
    slots, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[3]
    groups, tiled = kv_heads * plan.head_tiles, plan.head_tiles * plan.group

    def by_tile(values: jax.Array, axis: int) -> jax.Array:
        """The axis of heads divided into tiles of the plan's columns, filled up where need be."""

        def filled(values: jax.Array, axis: int, size: int) -> jax.Array:
            fill = [(0, 0)] * values.ndim
            fill[axis] = (0, size - values.shape[axis])
            return jnp.pad(values, fill) if size > values.shape[axis] else values

        before, after = values.shape[:axis], values.shape[axis + 1 :]
        values = filled(values.reshape(*before, kv_heads, -1, *after), axis + 1, tiled)
        values = values.reshape(*before, groups // plan.sharing, -1, *after)
        return filled(values, axis + 1, plan.columns)

    operands: list[Any] = [by_tile(q, 1), kv_pages, page_table, work.pieces, work.teams]
    operands.append(options.first_page.reshape(1))
    if sinks is not None:
        of_query = sinks.reshape(kv_heads, 1, plan.heads)
        of_query = jnp.broadcast_to(of_query, (kv_heads, plan.queries, plan.heads))
        operands.append(by_tile(of_query.reshape(-1), 0))
    if k_scale is not None and v_scale is not None:
        operands += [k_scale.reshape(1), v_scale.reshape(1)]

    results = [result_like(q, (slots, groups, plan.group, plan.head_dim), plan.dtype)]
    if plan.most_pieces > 1:
        part = (plan.most_pieces, slots, groups)
        shapes = (*part, plan.channels, plan.columns), (*part, plan.columns)
        results += [result_like(q, shape, jnp.float32) for shape in shapes]
        # pieces that have ended; XLA clears those of all layers in one kernel
        operands.append(jax.new_ref(jnp.zeros((slots, groups), jnp.int32)))

    def kernel(*references: Any) -> None:
        body = functools.partial(
            decode_kernel, *references, plan=plan, interpreted=interpreter.is_used(interpret)
        )
        pl.run_scoped(body, collective_axes="warpgroup", **plan.scratch())

    # `plgpu.kernel` takes no operand to be changed in place before JAX 0.11
    out, *_ = pl.kernel(
        kernel,
        out_type=results,
        mesh=plgpu.Mesh(
            # the last axis varies fastest: KV heads of the same tokens are neighbours in memory
            grid=(work.teams.shape[0], groups),
            grid_names=("team", "group"),
            num_threads=len(THREADS),
            thread_name="warpgroup",
            kernel_name="paged_decode",
        ),
        name="paged_decode",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands)
    out = out.reshape(slots, kv_heads, tiled, head_dim)[:, :, : heads // kv_heads]
    return out.reshape(q.shape)

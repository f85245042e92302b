"""Paged decode attention for NVIDIA Hopper in Pallas Mosaic GPU.

One thread block attends the query heads of one KV head of one slot over one split of its tokens.
It walks the page table and brings each page's keys and values of that head into a ring of shared
memory buffers by one strided TMA copy each; S = Q K^T and O += P V run on wgmma with the query
heads of the group as the first of 64 rows; the softmax is online, in base 2. Splits of a slot are
merged afterwards by their log-sum-exp (Dao et al., "Flash-Decoding for long-context inference",
2023).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import coverage
from pallas_kernels.compat import result_like, transposed
from pallas_kernels.errors import KernelError
from pallas_kernels.tuning import DecodeTuning

ROWS = 64  # the smallest first dimension of wgmma; query heads fill the first rows
BLOCK_TOKENS = 64  # keys a step: the largest page that is covered
BUFFERS = 4  # depth of the ring: three blocks are on their way while one is attended
STREAMING_MULTIPROCESSORS = 132  # of H100 and H200 SXM
MAX_SPLITS = 64
MASKED = -1e30  # finite: exp2(MASKED - MASKED) is 1, not NaN
ROWS_TILE = 8  # rows of one shared memory tile


def number_of_splits(slots: int, kv_heads: int, max_blocks: int) -> int:
    """Into how many thread blocks a slot's tokens are divided; depends on static shapes only.

    Enough that two thread blocks are there for every multiprocessor, as far as blocks of tokens
    suffice.
    """
    wanted = -(-2 * STREAMING_MULTIPROCESSORS // (slots * kv_heads))
    return max(1, min(wanted, max_blocks, MAX_SPLITS))


def _tiled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The layout that TMA and wgmma share for rows of so many elements."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return (
        plgpu.TilingTransform((ROWS_TILE, swizzle * 8 // bits)),
        plgpu.SwizzleTransform(swizzle),
    )


def _row_vector(value: float) -> jax.Array:  # float32[ROWS]
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _kernel(
    q_gmem: Any,  # [B, KVH, copied, D]
    kv_gmem: Any,  # [NP, page_size, 2, KVH, D]
    table_gmem: Any,  # int32[B, P]
    lens_gmem: Any,  # int32[B]
    base_gmem: Any,  # int32[1], added to every page id
    out_gmem: Any,  # float32[splits, B, KVH, copied, D]
    lse_gmem: Any,  # float32[splits, B, KVH, ROWS], base 2
    q_smem: Any,
    k_smem: Any,
    v_smem: Any,
    p_smem: Any,
    out_smem: Any,
    lse_smem: Any,
    q_ready: Any,
    k_ready: Any,
    v_ready: Any,
    *,
    scale: float,
    window: int | None,
    splits: int,
) -> None:
    split, kv_head, slot = (lax.axis_index(name) for name in ("split", "kv_head", "slot"))
    copied, head_dim = q_gmem.shape[2:]
    page_size = kv_gmem.shape[1]
    pages = BLOCK_TOKENS // page_size
    dtype = kv_gmem.dtype

    first_page = base_gmem[0]
    length = lens_gmem[slot]
    first_key = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    lowest_page = lax.div(first_key, jnp.int32(page_size))
    highest_page = jnp.maximum(lax.div(length + (page_size - 1), jnp.int32(page_size)) - 1, 0)
    first_block = lax.div(first_key, jnp.int32(BLOCK_TOKENS))
    last_block = lax.div(length + (BLOCK_TOKENS - 1), jnp.int32(BLOCK_TOKENS))
    share = lax.div(last_block - first_block + (splits - 1), jnp.int32(splits))
    begin = first_block + split * share
    steps = jnp.maximum(jnp.minimum(begin + share, last_block) - begin, 0)

    def page_ids(step: jax.Array) -> list[jax.Array]:
        # pages outside the visible range may be anybody's: the nearest visible one is read twice
        wanted = (begin + step) * pages
        return [
            table_gmem[slot, jnp.clip(wanted + j, lowest_page, highest_page)] + first_page
            for j in range(pages)
        ]

    def fetch(step: jax.Array, ids: list[jax.Array]) -> None:
        buffer = lax.rem(step, jnp.int32(BUFFERS))
        for part, smem, ready in ((0, k_smem, k_ready), (1, v_smem, v_ready)):
            for j, page in enumerate(ids):
                plgpu.copy_gmem_to_smem(
                    kv_gmem.at[page, :, part, kv_head],
                    smem.at[buffer, pl.ds(j * page_size, page_size)],
                    ready.at[buffer],
                )

    plgpu.copy_gmem_to_smem(q_gmem.at[slot, kv_head], q_smem.at[pl.ds(0, copied)], q_ready)
    starts = [jnp.int32(step) for step in range(BUFFERS)]
    for step, ids in zip(starts, [page_ids(step) for step in starts]):
        pl.when(step < steps)(functools.partial(fetch, step, ids))
    plgpu.barrier_wait(q_ready)

    def attend(
        step: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, highest, total = carry
        buffer = lax.rem(step, jnp.int32(BUFFERS))
        # read early: the page table answers from memory while this block is attended
        next_ids = page_ids(step + BUFFERS)
        low_key = (begin + step) * BLOCK_TOKENS

        def visible(shape: tuple[int, int], axis: int) -> jax.Array:
            key = low_key + plgpu.broadcasted_iota(
                jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA
            )
            return (key >= first_key) & (key < length)

        plgpu.barrier_wait(k_ready.at[buffer])

        def scored(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, q_smem, transposed(k_smem.at[buffer]))
            return acc[...]

        shape = (ROWS, BLOCK_TOKENS)
        scores = pl.run_scoped(scored, plgpu.ACC(shape, jnp.float32))
        # the factor turns exp into exp2
        scores = jnp.where(visible(shape, 1), scores * (scale * math.log2(math.e)), MASKED)
        rising = jnp.maximum(highest, scores.max(axis=1))
        decay = jnp.exp2(highest - rising)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(rising, shape, [0]))
        total = total * decay + weights.sum(axis=1)
        p_smem[...] = weights.astype(dtype)

        plgpu.barrier_wait(v_ready.at[buffer])

        @pl.when((low_key < first_key) | (low_key + BLOCK_TOKENS > length))
        def _() -> None:
            # a masked value may hold anything, NaN too, and a weight of 0 * NaN is NaN
            held = plgpu.layout_cast(v_smem[buffer], plgpu.Layout.WGMMA)
            v_smem[buffer] = jnp.where(visible(held.shape, 0), held, jnp.zeros_like(held))

        plgpu.commit_smem()

        def weighted(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, p_smem, v_smem.at[buffer])
            return acc[...]

        out = out * lax.broadcast_in_dim(decay, out.shape, [0])
        out = out + pl.run_scoped(weighted, plgpu.ACC((ROWS, head_dim), jnp.float32))
        pl.when(step + BUFFERS < steps)(functools.partial(fetch, step + BUFFERS, next_ids))
        return out, rising, total

    empty = plgpu.layout_cast(jnp.full((ROWS, head_dim), 0.0, jnp.float32), plgpu.Layout.WGMMA)
    carry = (empty, _row_vector(MASKED), _row_vector(0.0))
    out, highest, total = lax.fori_loop(0, steps, attend, carry)
    divisor = jnp.where(total == 0.0, 1.0, total)
    out_smem[...] = out / lax.broadcast_in_dim(divisor, out.shape, [0])
    lse_smem[...] = highest + jnp.log2(divisor)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, copied)], out_gmem.at[split, slot, kv_head])
    plgpu.copy_smem_to_gmem(lse_smem, lse_gmem.at[split, slot, kv_head])
    plgpu.wait_smem_to_gmem(0)


def decode(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    splits: int | None,
    first_page: jax.Array,  # int32[]
    tuning: DecodeTuning | None,
    interpret: Any,
) -> jax.Array:  # [B, H, D]
    """Attention of one query row a slot on an NVIDIA Hopper GPU.

    Softmax weights are rounded to the type of the pages before they are multiplied with the
    values; scores, maxima, sums and partial outputs are float32.

    Args:
        interpret: parameters of JAX's Mosaic GPU interpreter; None compiles for the GPU.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    coverage.require(
        coverage.mosaic_gpu_decode(coverage.AttentionShape.of(q, kv_pages)),
        "mosaic_gpu",
        q,
        kv_pages,
    )
    for name, value in (("soft_cap", soft_cap), ("sinks", sinks)):
        if value is not None:
            raise KernelError(name, value, "not an option of the mosaic_gpu decode kernel")
    max_blocks = -(-page_table.shape[1] * kv_pages.shape[1] // BLOCK_TOKENS)
    return _attend(
        q,
        kv_pages,
        page_table,
        kv_lens,
        first_page.reshape(1),
        scale=scale,
        window=window,
        splits=splits or number_of_splits(q.shape[0], kv_pages.shape[3], max_blocks),
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("scale", "window", "splits", "interpret"))
def _attend(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    base: jax.Array,  # int32[1]
    *,
    scale: float,
    window: int | None,
    splits: int,
    interpret: Any,
) -> jax.Array:  # [B, H, D]
    slots, heads, head_dim = q.shape
    page_size, _, kv_heads, _ = kv_pages.shape[1:]
    group = heads // kv_heads
    copied = -(-group // ROWS_TILE) * ROWS_TILE
    dtype = q.dtype

    grouped = q.reshape(slots, kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, copied - group), (0, 0)))
    ring = (BUFFERS, BLOCK_TOKENS, head_dim)
    tiles = _tiled(head_dim, dtype)
    pages = BLOCK_TOKENS // page_size
    out, lse = plgpu.kernel(
        functools.partial(_kernel, scale=scale, window=window, splits=splits),
        out_type=[
            result_like(q, (splits, slots, kv_heads, copied, head_dim), jnp.float32),
            result_like(q, (splits, slots, kv_heads, ROWS), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((ROWS, head_dim), dtype, transforms=tiles),
            plgpu.SMEM(ring, dtype, transforms=tiles),
            plgpu.SMEM(ring, dtype, transforms=tiles),
            plgpu.SMEM((ROWS, BLOCK_TOKENS), dtype, transforms=_tiled(BLOCK_TOKENS, dtype)),
            plgpu.SMEM((ROWS, head_dim), jnp.float32, transforms=_tiled(head_dim, jnp.float32)),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=pages, num_barriers=BUFFERS),
            plgpu.Barrier(num_arrivals=pages, num_barriers=BUFFERS),
        ],
        grid=(splits, kv_heads, slots),
        grid_names=("split", "kv_head", "slot"),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(grouped, kv_pages, page_table, kv_lens, base)

    lse = lse[..., :copied, None]
    # a split without tokens has the weight exp2(MASKED - max) = 0, or 1 of a zero output
    weights = jnp.exp2(lse - lse.max(axis=0))
    merged = (out * weights).sum(axis=0) / weights.sum(axis=0)
    return merged[:, :, :group].reshape(slots, heads, head_dim).astype(q.dtype)

"""Paged decode attention for NVIDIA GPUs in Pallas Triton: Ampere, Ada, Blackwell, float32 pages.

One thread block attends the query heads of one KV head of one slot over one split of its tokens.
The heads of the group, of all queries of the slot, are the rows of a tile: at least 16, the
smallest of the matrix instructions; what is more than a tile holds is another thread block's. Keys
and values are gathered through the page table, token by token, into tiles in shared memory that the
compiler fills ahead of their use by cp.async. A second kernel merges the splits that hold tokens by
their log-sum-exp (Dao et al., "Flash-Decoding for long-context inference", 2023); with one split
there is none.

JAX has deprecated its Triton backend since 0.11 in favour of Mosaic GPU. It is used here because
Mosaic GPU has the matrix instructions of Ampere and Ada only since 0.11, for 16- and 8-bit types
only, and JAX's interpreter runs neither them nor the cp.async copies that feed them: such a kernel
could be compiled but not checked without the GPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.backends.triton import TritonDecodeTuning
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.paged_attention.options import AttentionOptions, Scores
from pallas_kernels.paged_attention.queries import key_range
from pallas_kernels.paged_attention.softmax import MASKED
from pallas_kernels.paged_attention.triton.block import (
    HeadPages,
    Pages,
    attend_blocks,
    empty_softmax,
    head_columns,
    normalized,
    padded,
    page_operands,
    row_share,
)
from pallas_kernels.pages import compute_dtype

MATRIX_ROWS = 16  # rows of the matrix instructions
TILE_ROWS = 64  # most rows of a tile of several queries
MAX_SPLITS = 64


class Operands(NamedTuple):
    """References of the kernel's operands; None for what a call does without."""

    q: Any  # [B, Q * H, D]
    pages: Pages
    lens: Any  # int32[B]
    query_lens: Any  # int32[B]


def split_blocks(
    keys: tuple[jax.Array, jax.Array], split: jax.Array, *, block: int, splits: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The blocks of tokens that a split attends, and how many splits have any.

    Args:
        keys: the first visible token of a slot, and the one after the last.

    Returns:
        The first block, the block after the last, the live splits.
    """
    first_block = lax.div(keys[0], jnp.int32(block))
    last_block = lax.div(keys[1] + (block - 1), jnp.int32(block))
    share = jnp.maximum(lax.div(last_block - first_block + (splits - 1), jnp.int32(splits)), 1)
    live = lax.div(last_block - first_block + share - 1, share)
    begin = first_block + split * share
    return begin, jnp.minimum(begin + share, last_block), live


def number_of_splits(slots: int, kv_heads: int, blocks: int, tuning: TritonDecodeTuning) -> int:
    """Into how many thread blocks a slot's tokens are divided; depends on static facts only.

    Enough to give every multiprocessor the wanted number of thread blocks, as far as blocks of
    tokens suffice.
    """
    wanted = -(-tuning.waves * multiprocessors() // (slots * kv_heads))
    return max(1, min(wanted, blocks, MAX_SPLITS))


def tile_rows(queries: int, q: jax.Array, kv_pages: jax.Array) -> int:
    """Rows of a tile: the heads of a group, and of several queries as many as registers hold."""
    group, head_dim = q.shape[-2] // kv_pages.shape[3], q.shape[-1]
    rows = max(MATRIX_ROWS, padded(queries * group))
    if queries == 1:
        return rows
    most = TILE_ROWS
    if compute_dtype(kv_pages.dtype, q.dtype) == jnp.float32:
        # IEEE products are made of multiply-adds, with all operands in registers
        most //= 4 if head_dim >= 128 else 2
    return min(rows, most)


def _split_kernel(
    given: Operands,
    out: Any,
    lse: Any = None,
    *,
    options: Scores,
    block: int,
    splits: int,
    page_size: int,
    kv_heads: int,
    queries: int,
    rows: int,
) -> None:
    """Writes normalised [B, Q * H, D] where `lse` is None, else partials [B, Q * H, splits, D]."""
    q, dtype = given.q, compute_dtype(given.pages.kv.dtype, given.q.dtype)
    split, kv_head, slot = (pl.program_id(axis) for axis in range(3))
    heads, head_dim = q.shape[1] // queries, q.shape[2]
    group = heads // kv_heads
    tiles = pl.cdiv(queries * group, rows)

    length = given.lens[slot]
    count = None if given.query_lens is None else given.query_lens[slot]
    keys = key_range(length, count, queries, options.window)
    begin, end, _ = split_blocks(keys, split, block=block, splits=splits)
    row = jnp.arange(rows)
    if tiles > 1:
        row += lax.rem(kv_head, jnp.int32(tiles)) * rows
        kv_head = lax.div(kv_head, jnp.int32(tiles))
    if queries == 1:
        head = place = kv_head * group + row
        position = None
    else:
        query = lax.div(row, jnp.int32(group))
        head = kv_head * group + lax.rem(row, jnp.int32(group))
        place = query * heads + head
        own = queries if count is None else count
        # one that does not exist sees nothing
        position = jnp.where(query < own, length - own + query, -1)
    columns, exists = head_columns(head_dim)
    exists_row = row < queries * group
    held = jnp.broadcast_to(exists_row[:, None], (rows, columns.shape[0]))
    if exists is not None:
        held &= exists[None, :]
    loaded = plt.load(q.at[slot, place[:, None], columns[None, :]], mask=held, other=0)
    sinks = None
    if given.pages.sinks is not None:
        # part of the first split: a slot with tokens has one
        sinks = plt.load(given.pages.sinks.at[head], mask=exists_row & (split == 0), other=MASKED)
    first_page = given.pages.first_page[0]
    pages = HeadPages(given.pages, slot, kv_head, first_page, page_size, kv_heads)
    softmax = attend_blocks(
        pages,
        loaded.astype(dtype),
        empty_softmax(rows, columns.shape[0], sinks),
        (begin, end),
        keys,
        size=block,
        position=position,
        masked=True,
        options=options,
    )
    result, log_sum = normalized(pages, softmax)
    if position is not None:
        # where nothing is visible every weight is 1
        result = jnp.where((position >= 0)[:, None], result, 0.0)
    if lse is None:
        plt.store(
            out.at[slot, place[:, None], columns[None, :]], result.astype(out.dtype), mask=held
        )
        return

    @pl.when(begin < end)
    def store_partial() -> None:
        plt.store(out.at[slot, place[:, None], split, columns[None, :]], result, mask=held)
        plt.store(lse.at[slot, place, split], log_sum, mask=exists_row)


def _merge_kernel(
    partial: Any,  # float32[B, Q * H, splits, D]
    lse: Any,  # float32[B, Q * H, splits]
    lens: Any,  # int32[B]
    query_lens: Any,  # int32[B] or None
    out: Any,  # [B, Q * H, D]
    *,
    window: int | None,
    block: int,
    queries: int,
) -> None:
    head, slot = pl.program_id(0), pl.program_id(1)
    splits, head_dim = partial.shape[2:]
    count = None if query_lens is None else query_lens[slot]
    keys = key_range(lens[slot], count, queries, window)
    *_, live = split_blocks(keys, jnp.int32(0), block=block, splits=splits)
    split = jnp.arange(padded(splits))
    columns, exists = head_columns(head_dim)
    filled = split < live
    logs = plt.load(lse.at[slot, head, split], mask=filled, other=MASKED)
    weights = jnp.where(filled, jnp.exp2(logs - logs.max()), 0.0)
    held = jnp.broadcast_to(filled[:, None], (split.shape[0], columns.shape[0]))
    if exists is not None:
        held &= exists[None, :]
    place = partial.at[slot, head, split[:, None], columns[None, :]]
    merged = (plt.load(place, mask=held, other=0) * weights[:, None]).sum(axis=0)
    total = weights.sum()
    merged = merged / jnp.where(total == 0.0, 1.0, total)
    plt.store(out.at[slot, head, columns], merged.astype(out.dtype), mask=exists)


@functools.partial(jax.jit, static_argnames=("splits", "interpret", "tuning"))
def decode(
    q: jax.Array,  # [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
    *,
    splits: int | None = None,
    interpret: bool | None = None,
    tuning: TritonDecodeTuning | None = None,
) -> jax.Array:  # [B, Q, H, D]
    """Attention of up to Q queries a slot on an NVIDIA GPU.

    Float pages: queries and softmax weights are rounded to the type of the pages before they are
    multiplied; quantised pages are converted, exactly, to the type of the queries. float32
    products are IEEE float32, not TF32. Scores, maxima, sums and partial outputs are float32.

    Args:
        splits: thread blocks that share the tokens of a slot; None chooses by static shapes.
        interpret: True runs Pallas' interpreter; None compiles for the GPU.
        tuning: block of tokens, warps, stages; None takes those of the table.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    tuning = tuning or TritonDecodeTuning()
    if splits is not None and splits > MAX_SPLITS:
        raise KernelError("splits", splits, f"at most {MAX_SPLITS}: they are merged in one tile")
    batch, queries, heads, head_dim = q.shape
    page_size, _, kv_heads, _ = kv_pages.shape[1:]
    rows = tile_rows(queries, q, kv_pages)
    tiles = pl.cdiv(queries * heads // kv_heads, rows)
    # the rows beyond the smallest tile take registers of further warps: with four warps 32 spill
    warps = tuning.num_warps * (2 if queries > 1 and rows > MATRIX_ROWS else 1)
    block = row_share(tuning.block_tokens, "block_tokens", q, kv_pages)
    blocks = -(-page_table.shape[1] * page_size // block)
    splits = splits or number_of_splits(batch, kv_heads * tiles, blocks, tuning)
    operands = Operands(
        q=q.reshape(batch, queries * heads, head_dim),
        pages=page_operands(kv_pages, page_table, options),
        lens=kv_lens,
        query_lens=options.query_lens,
    )
    attended = result_like(q, operands.q.shape, q.dtype)
    partial = (
        result_like(q, (batch, queries * heads, splits, head_dim), jnp.float32),
        result_like(q, (batch, queries * heads, splits), jnp.float32),
    )
    result = pl.pallas_call(
        functools.partial(
            _split_kernel,
            options=options.scores,
            page_size=page_size,
            kv_heads=kv_heads,
            block=block,
            splits=splits,
            queries=queries,
            rows=rows,
        ),
        out_shape=attended if splits == 1 else partial,
        grid=(splits, kv_heads * tiles, batch),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=tuning.stages),
        interpret=interpreter.is_used_by_triton(interpret),
        name="paged_decode",
    )(operands)
    if splits == 1:
        return result.reshape(q.shape)
    merge = functools.partial(
        _merge_kernel, window=options.scores.window, block=block, queries=queries
    )
    merged = pl.pallas_call(
        merge,
        out_shape=attended,
        grid=(queries * heads, batch),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpreter.is_used_by_triton(interpret),
        name="paged_decode_merge",
    )(*result, kv_lens, options.query_lens)
    return merged.reshape(q.shape)

"""Paged prefill attention for NVIDIA GPUs in Pallas Triton: Ampere, Ada, Blackwell, float32 pages.

The work is a list of (lane, first token) items, made by XLA before the kernel: its length is
static, enough for any lanes that fit the region, and an item without work ends at once. One thread
block attends a tile of one item: the rows are the tokens of the item times the query heads of one
KV head, so that a group reads its keys and values once. Blocks of keys that every row sees are
attended without masks; those around the diagonal, and all of them under a sliding window, with
masks (Dao, "FlashAttention-2", 2023). Keys and values are gathered as by the decode kernel.

About JAX's deprecation of Pallas Triton see `triton_decode`.
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
from pallas_kernels.backends.triton import TritonPrefillTuning
from pallas_kernels.compat import result_like
from pallas_kernels.paged_attention.lanes import PrefillLanes, divide
from pallas_kernels.paged_attention.options import AttentionOptions, Scores
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
from pallas_kernels.pages import compute_dtype, is_quantized

# with fewer, Triton fetches a block only after the one before it has been attended
OVERLAPPING_STAGES = 3


class Operands(NamedTuple):
    """References of the kernel's operands; None for what a call does without."""

    q: Any  # [C, H, D]
    pages: Pages
    work: Any  # int32[items, 4]: lane, first row, rows, position of the first row
    zeros: Any  # [C, H, D], the output before the kernel


def tile_shape(tuning: TritonPrefillTuning, q: jax.Array, kv_pages: jax.Array) -> tuple[int, int]:
    """Tokens of a block and rows of a tile, such that a thread's registers hold them.

    Raises:
        KernelError: a tuned size is not a power of two.
    """
    block = row_share(tuning.block_tokens, "block_tokens", q, kv_pages)
    rows = row_share(tuning.tile_rows, "tile_rows", q, kv_pages)
    head_dim, dtype = q.shape[2], compute_dtype(kv_pages.dtype, q.dtype)
    if dtype == jnp.float32:
        # IEEE products are made of multiply-adds, with all operands in registers
        rows = max(16, rows // (4 if head_dim >= 128 else 2))
    if dtype == jnp.float32 or is_quantized(kv_pages.dtype) or head_dim != padded(head_dim):
        # conversion, or the mask of the columns, takes registers too
        block = max(16, block // 2)
    return block, max(rows, padded(q.shape[1] // kv_pages.shape[3]))


def work_items(lanes: PrefillLanes, *, region: int, tile: int) -> jax.Array:
    """int32[region // tile + N, 4]: the tiles of all lanes as rows of a table.

    The last tiles of a lane, which see the most keys, come first.
    """
    return jnp.stack(divide(lanes, region, tile, backwards=True), axis=1)


def _kernel(
    given: Operands,
    out: Any,
    *,
    options: Scores,
    rows: int,
    block: int,
    page_size: int,
    kv_heads: int,
    row_invariant: bool,
) -> None:
    # with `row_invariant` all blocks have masks: around a mask the compiler rounds elsewhere
    q, dtype = given.q, compute_dtype(given.pages.kv.dtype, given.q.dtype)
    kv_head, item = pl.program_id(0), pl.program_id(1)
    group, head_dim = q.shape[1] // kv_heads, q.shape[2]
    lane, first_row, held_rows, first_position = (given.work[item, field] for field in range(4))

    row = jnp.arange(rows)
    token_row = lax.div(row, jnp.int32(group))
    head = kv_head * group + lax.rem(row, jnp.int32(group))
    position = first_position + token_row
    columns, exists = head_columns(head_dim)
    held = jnp.broadcast_to((token_row < held_rows)[:, None], (rows, columns.shape[0]))
    if exists is not None:
        held &= exists[None, :]
    place = (first_row + token_row[:, None], head[:, None], columns[None, :])
    keys = jnp.where(held_rows > 0, first_position + held_rows, 0)  # that the last row sees
    first_key = jnp.int32(0)
    if options.window is not None:
        first_key = jnp.minimum(jnp.maximum(first_position + 1 - options.window, 0), keys)

    first_page = given.pages.first_page[0]
    pages = HeadPages(given.pages, lane, kv_head, first_page, page_size, kv_heads)
    query = plt.load(q.at[place], mask=held, other=0).astype(dtype)
    sinks = None if given.pages.sinks is None else plt.load(given.pages.sinks.at[head])

    attend = functools.partial(
        attend_blocks, pages, query, keys=(first_key, keys), size=block, options=options
    )
    softmax = empty_softmax(rows, columns.shape[0], sinks)
    begin = lax.div(first_key, jnp.int32(block))
    end = lax.div(keys + (block - 1), jnp.int32(block))
    if options.window is None and not row_invariant:
        # the first row sees first_position + 1 keys, and every other row sees these too
        whole = jnp.minimum(lax.div(first_position + 1, jnp.int32(block)), end)
        softmax = attend(softmax, (begin, whole), position=None, masked=False)
        begin = whole
    softmax = attend(softmax, (begin, end), position=position, masked=True)
    result, _ = normalized(pages, softmax)
    plt.store(out.at[place], result.astype(out.dtype), mask=held)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    options: AttentionOptions,
    *,
    tuning: TritonPrefillTuning | None = None,
    interpret: bool | None = None,
) -> jax.Array:  # [C, H, D]
    """Causal attention of packed chunks on an NVIDIA GPU; rows that no lane owns are zero.

    Types and rounding are those of `triton_decode.decode`.

    Args:
        tuning: rows of a tile, keys a block, warps, stages; None takes the defaults.
        interpret: True runs Pallas' interpreter; None compiles for the GPU.

    Raises:
        KernelError: the kernel does not cover the shapes or types; names them.
    """
    tuning = tuning or TritonPrefillTuning()
    region, heads, _ = q.shape
    page_size, _, kv_heads, _ = kv_pages.shape[1:]
    group = heads // kv_heads
    block, rows = tile_shape(tuning, q, kv_pages)
    work = work_items(lanes, region=region, tile=rows // group)
    operands = Operands(
        q=q, pages=page_operands(kv_pages, page_table, options), work=work, zeros=jnp.zeros_like(q)
    )
    return pl.pallas_call(
        functools.partial(
            _kernel,
            options=options.scores,
            page_size=page_size,
            kv_heads=kv_heads,
            rows=rows,
            block=block,
            row_invariant=options.row_invariant,
        ),
        out_shape=result_like(q, q.shape, q.dtype),
        grid=(kv_heads, work.shape[0]),
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 0},
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps, num_stages=max(tuning.stages, OVERLAPPING_STAGES)
        ),
        interpret=interpreter.is_used_by_triton(interpret),
        name="paged_prefill",
    )(operands)

"""The common parts of the Triton kernels: fetching pages by a page table, online softmax.

A block of tokens is gathered row by row: every row has its own pointer, made from the page table,
so tokens of one block may lie in any pages. Tokens that may not be read are never loaded and count
as zero, so that whatever lies there cannot leak (0 * NaN is NaN).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels.backends import triton
from pallas_kernels.coverage import PageFacts
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.options import AttentionOptions, Scores
from pallas_kernels.paged_attention.softmax import LOG2E, MASKED, base2_scores
from pallas_kernels.pages import as_values, compute_dtype, value_dtype

ROW_BYTES = 256  # of one token of one head, for which a tuned block is meant
# e4m3 bits moved into a float16 stand for the number times 2 ** -8
E4M3_BIAS = 256.0


class Softmax(NamedTuple):
    """Online softmax of M rows, in base 2 (Milakov and Gimelshein, 2018)."""

    out: jax.Array  # float32[M, width], not yet divided by total
    highest: jax.Array  # float32[M]
    total: jax.Array  # float32[M]


class Pages(NamedTuple):
    """The operands that name keys and values, in a kernel their references."""

    kv: Any  # the pool as rows, [NP * page_size * 2 * KVH, D]
    table: Any  # int32[requests, P]
    first_page: Any  # int32[1], added to every page id
    sinks: Any  # float32[H] or None
    k_scale: Any  # float32[1] or bfloat16[NP, KVH, page_size]; None for float pages
    v_scale: Any


class HeadPages(NamedTuple):
    """One KV head of one request: where its tokens are.

    Attributes:
        of: references of the pages' operands.
        row: row of the page table.
        kv_head: index of the KV head.
        first_page: added to every page id.
        page_size, kv_heads: tokens a page, and KV heads of the pool.
    """

    of: Pages
    row: jax.Array
    kv_head: jax.Array
    first_page: jax.Array
    page_size: int
    kv_heads: int


def padded(size: int) -> int:
    """The next power of two: Triton has no other array sizes."""
    return 1 << (size - 1).bit_length()


def row_share(wanted: int, option: str, q: jax.Array, kv_pages: jax.Array) -> int:
    """A tuned number of rows of a tile, which is meant for rows of 256 bytes (a 16-bit head of
    128), or fewer for longer rows; at least 16.

    Raises:
        KernelError: the tuned number is not a power of two.
    """
    if wanted != padded(wanted):
        raise KernelError(f"tuning.{option}", wanted, "a power of two")
    row = padded(q.shape[-1]) * compute_dtype(kv_pages.dtype, q.dtype).itemsize
    return max(16, min(wanted, wanted * ROW_BYTES // row))


def pool_rows(kv_pages: jax.Array) -> jax.Array:  # [NP * page_size * 2 * KVH, D]
    """The pool as rows of one token of one head: free of cost, and one index to compute."""
    return kv_pages.reshape(-1, kv_pages.shape[4])


def page_operands(kv_pages: jax.Array, page_table: jax.Array, options: AttentionOptions) -> Pages:
    """The operands of a kernel that name keys and values.

    Raises:
        KernelError: the pool is one that the kernels would address wrongly.
    """
    require_addressable(kv_pages)
    return Pages(
        pool_rows(kv_pages),
        page_table,
        options.first_page.reshape(1),
        options.sinks,
        _vector(options.k_scale),
        _vector(options.v_scale),
    )


def require_addressable(kv_pages: jax.Array) -> None:
    """Refuses the pools that the kernels would address wrongly, see `most_pages` of their record.

    Raises:
        KernelError: the pool is one of these.
    """
    pages, page_size, _, kv_heads, head_dim = kv_pages.shape
    page = PageFacts(page_size * 2 * kv_heads, head_dim, kv_pages.dtype.itemsize)
    most = triton.most_pages(page, pages)
    if most < pages:
        raise KernelError(
            "kv_pages.shape",
            kv_pages.shape,
            f"the triton backend takes {most} of these pages, or so many that 1-byte elements are "
            "more than 4 GiB; in all fewer than 2 ** 31 rows of keys and values",
        )


def head_columns(head_dim: int) -> tuple[jax.Array, jax.Array | None]:
    """Indices of the columns of a tile, int32[width], and which of them exist (None: all)."""
    columns = jnp.arange(padded(head_dim))
    return columns, None if columns.shape[0] == head_dim else columns < head_dim


def _vector(scale: jax.Array | None) -> jax.Array | None:
    """A scale as a kernel takes it: float32[1] for one of the whole pool."""
    return scale.reshape(1) if scale is not None and scale.ndim == 0 else scale


def both(first: jax.Array | None, second: jax.Array | None) -> jax.Array | None:
    """The conjunction of two masks that broadcast, where None is all true."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return plt.load(ref)
    return plt.load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=jnp.zeros((), ref.dtype))


def _numbers(stored: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Stored elements in the type of a dot; e4m3 as the number divided by E4M3_BIAS, exactly."""
    stored = as_values(stored)
    if stored.dtype == jnp.float8_e4m3fn:
        # by bits, because conversion instructions exist from compute capability 8.9 only
        bits = lax.bitcast_convert_type(stored, jnp.uint8).astype(jnp.uint16)
        magnitude = bits & 0x7F
        half = jnp.where(magnitude == 0x7F, jnp.uint16(0x7E00), magnitude << 7)
        stored = lax.bitcast_convert_type(half | ((bits & 0x80) << 8), jnp.float16)
    return stored.astype(dtype)


def _common_factor(kv: Any, scale: Any) -> jax.Array | float:
    """The factor of all stored keys, or all stored values, of a pool."""
    bias = E4M3_BIAS if value_dtype(kv.dtype) == jnp.float8_e4m3fn else 1.0
    return bias if scale is None or len(scale.shape) == 3 else scale[0] * bias


def empty_softmax(rows: int, width: int, sinks: jax.Array | None) -> Softmax:
    """Before the first key; a sink is a logit without a value.

    Args:
        rows: M.
        width: padded head_dim.
        sinks: float32[M] in base e, or None.
    """
    if sinks is None:
        highest, total = jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    else:
        highest, total = sinks * LOG2E, jnp.ones((rows,), jnp.float32)
    return Softmax(jnp.zeros((rows, width), jnp.float32), highest, total)


def attend_blocks(
    pages: HeadPages,
    query: jax.Array,  # [M, width]
    softmax: Softmax,
    blocks: tuple[jax.Array, jax.Array],
    keys: tuple[jax.Array, jax.Array],
    *,
    size: int,
    position: jax.Array | None,  # int32[M]
    masked: bool,
    options: Scores,
) -> Softmax:
    """Takes a range of blocks of tokens into account.

    Args:
        pages: the pages with the tokens of this head.
        query: in the type of the dot with the keys.
        softmax: state after the tokens before.
        blocks: the first block, and the one after the last.
        keys: the first token that may be read, and the one after the last.
        size: tokens of a block.
        position: of each row, which sees tokens up to it, and in its window; None: all of `keys`.
        masked: whether there may be tokens in the blocks that a row does not see.
        options: how scores are made of products.
    """
    shift = pages.page_size.bit_length() - 1

    def tokens(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = step * size + jnp.arange(size)
        return token, (token >= keys[0]) & (token < keys[1])

    def page_ids(step: jax.Array) -> jax.Array:
        token, readable = tokens(step)
        return _load(pages.of.table.at[pages.row, token >> shift], readable)

    def attend(step: jax.Array, carry: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
        page, softmax = carry
        # read one block ahead: the compiler prefetches only what it can address without waiting
        next_page = page_ids(step + 1)
        token, readable = tokens(step)
        visible = readable[None, :]
        if position is not None:
            visible &= token[None, :] <= position[:, None]
            if options.window is not None:
                visible &= position[:, None] - token[None, :] < options.window
        softmax = _attend_block(
            pages,
            query,
            softmax,
            page + pages.first_page,
            token & (pages.page_size - 1),
            readable=readable if masked else None,
            visible=visible if masked else None,
            options=options,
        )
        return next_page, softmax

    return lax.fori_loop(*blocks, attend, (page_ids(blocks[0]), softmax))[1]


def _attend_block(
    pages: HeadPages,
    query: jax.Array,  # [M, width]
    softmax: Softmax,
    page: jax.Array,  # int32[T]
    offset: jax.Array,  # int32[T]
    *,
    readable: jax.Array | None,  # bool[T]
    visible: jax.Array | None,  # bool[M or 1, T]
    options: Scores,
) -> Softmax:
    place = page * pages.page_size + offset
    columns, exists = head_columns(pages.of.kv.shape[1])
    loaded = both(
        None if readable is None else readable[:, None], None if exists is None else exists[None]
    )

    def fetched(part: int, dtype: DTypeLike) -> jax.Array:  # [T, width]
        row = (place * 2 + part) * pages.kv_heads + pages.kv_head
        return _numbers(_load(pages.of.kv.at[row[:, None], columns[None, :]], loaded), dtype)

    def scales(scale: Any) -> jax.Array | None:  # float32[T]
        if scale is None or len(scale.shape) == 1:
            return None
        return as_values(_load(scale.at[page, pages.kv_head, offset], readable)).astype(jnp.float32)

    scores = plt.dot(query, fetched(0, query.dtype).T, precision=lax.Precision.HIGHEST)
    k_scales, v_scales = scales(pages.of.k_scale), scales(pages.of.v_scale)
    if k_scales is not None:
        scores *= k_scales[None, :]
    k_factor = _common_factor(pages.of.kv, pages.of.k_scale)
    scores = base2_scores(scores, k_factor, options)
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)

    # before its first visible key a row has the maximum MASKED and weights of 1: what they add is
    # multiplied by exp2(MASKED - maximum) = 0 later
    rising = jnp.maximum(softmax.highest, scores.max(axis=1))
    decay = jnp.exp2(softmax.highest - rising)
    weights = jnp.exp2(scores - rising[:, None])
    total = softmax.total * decay + weights.sum(axis=1)
    dtype = query.dtype
    if v_scales is not None:
        # a weight takes the scale of its value along, which float16 might not hold
        weights *= v_scales[None, :]
        dtype = jnp.bfloat16 if dtype == jnp.float16 else dtype
    added = plt.dot(weights.astype(dtype), fetched(1, dtype), precision=lax.Precision.HIGHEST)
    return Softmax(softmax.out * decay[:, None] + added, rising, total)


def normalized(pages: HeadPages, softmax: Softmax) -> tuple[jax.Array, jax.Array]:
    """The output, float32[M, width], and the log-sum-exp in base 2, float32[M].

    Rows that saw nothing give zero and MASKED.
    """
    total = jnp.where(softmax.total == 0.0, 1.0, softmax.total)
    factor = _common_factor(pages.of.kv, pages.of.v_scale)
    return softmax.out * (factor / total)[:, None], softmax.highest + jnp.log2(total)

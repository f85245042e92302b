"""Paged attention: the public functions, their checks and the explicit choice of a backend.

Backends take `first_page` as an operand and are jitted, so the layers of a model share one trace
and one compiled kernel instead of having one each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import coverage
from pallas_kernels.backends import resolve
from pallas_kernels.backends.record import Tuning
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.paged_attention.lanes import PrefillLanes
from pallas_kernels.paged_attention.options import AttentionOptions, Scores
from pallas_kernels.paged_attention.queries import MAX_QUERIES
from pallas_kernels.pages import (
    FLOAT_DTYPES,
    POOL_DTYPES,
    POOL_DTYPES_TEXT,
    SCALES_TEXT,
    is_quantized,
    is_scale,
    scales_shape,
    whole_heads,
)
from pallas_kernels.tpu_pages import LANES


def paged_decode_attention(
    q: jax.Array,  # [B, H, D] or [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    *,
    query_lens: jax.Array | None = None,  # int32[B]
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,  # float32[H]
    k_scale: jax.Array | None = None,  # float32[] or bfloat16[NP, KVH, page_size]
    v_scale: jax.Array | None = None,
    splits: int | None = None,
    first_page: int | jax.Array = 0,
    backend: str,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [B, H, D] or [B, Q, H, D]
    """Attention of the last tokens of each slot over the tokens that its page table row names.

    A slot has one query, its last token, or up to Q of 1 to 8 (drafts to be verified, say): query i
    of n is token kv_lens - n + i and sees the tokens up to itself. Token t of slot b lies in page
    `first_page + page_table[b, t // page_size]` at offset `t % page_size`, keys at index 0 and
    values at index 1 of the third axis. Head h reads KV head `h // (H // KVH)`. Everything in the
    pool that no query of a slot may see may hold any bits, NaN too.

    Args:
        q: queries, rotary embedding applied; float32, float16 or bfloat16. Without the axis Q
            there is one a slot.
        kv_pages: the pool: float32, float16, bfloat16, int8, float8_e4m3fn, uint16 (bfloat16 bits)
            or uint8 (float8_e4m3fn bits). A head may be several rows that lie side by side,
            [NP, page_size, 2, KVH * n, D / n], as a TPU wants those of 256.
        page_table: page ids, each below NP - first_page; entries past a slot's length are ignored
            but must be valid page ids.
        kv_lens: tokens of each slot, its last query included; 0 = idle, gives zeros.
        query_lens: how many of the Q queries each slot has, 0 to Q; None: all. Those behind give
            zeros, and so do queries before a slot's first token.
        scale: factor of the scores, usually head_dim ** -0.5.
        soft_cap: bound of the scores: `soft_cap * tanh(score / soft_cap)` (Gemma Team, "Gemma 2",
            2024).
        window: sliding window in tokens: key j is visible when position - j < window, where
            position is the query's own.
        sinks: a logit a head that takes part in the softmax and has no value (Xiao et al.,
            "Efficient Streaming Language Models with Attention Sinks", 2024; learned, as in
            gpt-oss).
        k_scale: what a stored element of the keys is multiplied with, given exactly when the pages
            are of 8 bits: one for the whole pool, or bfloat16 (or its bits, uint16) by page, KV
            head and token, see `write_kv_scaled`.
        v_scale: likewise for the values.
        splits: parts into which each slot's tokens are divided; None chooses from the shapes. An
            option of the GPU and TPU kernels.
        first_page: added to every page id (layer * pages_per_layer in a pool of all layers).
        backend: "xla" (any device), "mosaic_tpu" (TPU), "mosaic_gpu" (NVIDIA Hopper), "triton"
            (NVIDIA Ampere and later), "native" (CPU, C++) or "reference".
        tuning: tile sizes of a GPU or TPU kernel, of its own type; None takes the
            defaults.
        interpret: parameters of the interpreter of a GPU or TPU kernel; None compiles it.

    Returns:
        Attention output in the type of q.

    Raises:
        KernelError: a shape, a dtype or the backend is not supported; names it.
    """
    chosen = resolve("decode", backend)
    check_queries(q, query_lens)
    queries = q if q.ndim == 4 else q[:, None]
    options = checked_options(
        queries, kv_pages, page_table, scale, soft_cap, window, sinks, k_scale, v_scale, first_page
    )
    check_slots(queries, page_table, kv_lens)
    kv_lens, options = with_query_lens(queries, kv_lens, query_lens, options)
    if splits is not None and splits < 1:
        raise KernelError("splits", splits, "None, or at least 1")
    of_kernel = chosen.options(splits=splits, tuning=tuning, interpret=interpret)
    if chosen.interprets:
        coverage.require(chosen.covers, backend, q, kv_pages, k_scale)
    if chosen.head_rows is None:
        kv_pages = whole_heads(kv_pages, q.shape[-1])
    run = chosen.load().decode
    return run(queries, kv_pages, page_table, kv_lens, options, **of_kernel).reshape(q.shape)


def paged_prefill_attention(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,  # float32[H]
    k_scale: jax.Array | None = None,  # float32[] or bfloat16[NP, KVH, page_size]
    v_scale: jax.Array | None = None,
    first_page: int | jax.Array = 0,
    last_seen: jax.Array | None = None,  # int32[C]
    row_invariant: bool = False,
    backend: str,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [C, H, D]
    """Causal attention of chunks of several requests, packed in one region of C query rows.

    The keys and values of the chunks themselves are already in the pages, so a row at position p
    sees the tokens 0 .. p of its lane's page table row (all of its earlier context included).

    Args:
        q: queries, rotary embedding applied; float32, float16 or bfloat16.
        kv_pages: the pool, as for `paged_decode_attention`.
        page_table: page ids, one row a lane, each below NP - first_page.
        lanes: the rows and positions of each lane; see PrefillLanes.
        scale: factor of the scores, usually head_dim ** -0.5.
        soft_cap: bound of the scores, as for `paged_decode_attention`.
        window: sliding window in tokens: key j is visible when position - j < window.
        sinks: a logit a head without a value, as for `paged_decode_attention`.
        k_scale: scale of 8-bit keys, as for `paged_decode_attention`.
        v_scale: likewise for the values.
        first_page: added to every page id (layer * pages_per_layer in a pool of all layers).
        last_seen: position of the last token that each row sees, not before its own; None: its own.
            The lane's chunk reaches as far. `window` counts from the row's own position.
        row_invariant: attend to a row in one order, in whatever chunk or place of the region, and
            whatever rows are beside it; not by "xla" or "reference". That of "native" is the order
            in which `paged_decode_attention` attends to a single query.
        backend: "xla" (any device), "mosaic_gpu" (NVIDIA Hopper), "triton" (NVIDIA Ampere and
            later), "mosaic_tpu" (TPU), "native" (CPU, C++) or "reference".
        tuning: tile sizes of a GPU or TPU kernel, of its own type; None takes the
            defaults.
        interpret: parameters of the interpreter of a GPU or TPU kernel; None compiles it.

    Returns:
        Attention output in the type of q; rows that no lane owns are zero.

    Raises:
        KernelError: a shape, a dtype or the backend is not supported; names it.
    """
    chosen = resolve("prefill", backend)
    if q.ndim != 3:
        raise KernelError("q.shape", q.shape, "[rows, heads, head_dim]")
    options = checked_options(
        q, kv_pages, page_table, scale, soft_cap, window, sinks, k_scale, v_scale, first_page
    )
    if row_invariant and not chosen.in_one_order:
        raise KernelError("row_invariant", row_invariant, f"False with the {backend} backend")
    if last_seen is not None:
        check_array("last_seen", last_seen, jnp.int32, q.shape[:1])
        coverage.refuse(chosen.refuses_ahead, backend, q, kv_pages)
    options = replace(options, row_invariant=row_invariant, last_seen=last_seen)
    for name, vector in zip(PrefillLanes._fields, lanes):
        check_array(f"lanes.{name}", vector, jnp.int32, page_table.shape[:1])
    of_kernel = chosen.options(tuning=tuning, interpret=interpret)
    if chosen.interprets:
        coverage.require(chosen.covers, backend, q, kv_pages, k_scale)
    if chosen.head_rows is None:
        kv_pages = whole_heads(kv_pages, q.shape[-1])
    return chosen.load().prefill(q, kv_pages, page_table, lanes, options, **of_kernel)


def checked_options(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    first_page: int | jax.Array,
) -> AttentionOptions:
    """The options that every backend takes, for queries [..., H, D].

    Raises:
        KernelError: a shape, a dtype or an option is not supported; names it.
    """
    heads, head_dim = q.shape[-2:]
    if q.dtype not in FLOAT_DTYPES:
        raise KernelError("q.dtype", q.dtype, "float32, float16 or bfloat16")
    if kv_pages.ndim != 5 or kv_pages.shape[2] != 2 or not _holds(kv_pages.shape, head_dim):
        raise KernelError(
            "kv_pages.shape",
            kv_pages.shape,
            f"[pages, page_size, 2, kv_heads, {head_dim}], or whole rows of 128 a head",
        )
    if kv_pages.dtype not in POOL_DTYPES:
        raise KernelError("kv_pages.dtype", kv_pages.dtype, POOL_DTYPES_TEXT)
    kv_heads = kv_pages.shape[3] * kv_pages.shape[4] // head_dim
    if heads % kv_heads:
        raise KernelError(
            "q.shape", q.shape, f"the heads are a multiple of the {kv_heads} KV heads"
        )
    if page_table.ndim != 2 or page_table.dtype != jnp.int32:
        raise KernelError(
            "page_table", f"{page_table.dtype}{page_table.shape}", "int32[rows or lanes, pages]"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise KernelError("soft_cap", soft_cap, "None, or above 0")
    if window is not None and window < 1:
        raise KernelError("window", window, "None, or at least 1 token")
    if sinks is not None:
        check_array("sinks", sinks, jnp.float32, (heads,))
    check_scales(kv_pages, k_scale, v_scale)
    if isinstance(first_page, int) and not 0 <= first_page < kv_pages.shape[0]:
        raise KernelError("first_page", first_page, f"a page of the pool, < {kv_pages.shape[0]}")
    scores = Scores(scale, soft_cap, window)
    return AttentionOptions(scores, sinks, k_scale, v_scale, jnp.int32(first_page))


def _holds(shape: tuple[int, ...], head_dim: int) -> bool:
    """Whether a pool of a shape has heads of that size, each one row or several of 128."""
    rows, width = shape[3:]
    return width == head_dim or (width == LANES and rows * LANES % head_dim == 0)


def check_scales(kv_pages: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None) -> None:
    """Refuses scales that do not fit the pool.

    Raises:
        KernelError: 8-bit pages without scales, scales of other pages, or scales of wrong shapes.
    """
    whole = scales_shape(kv_pages.shape)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (value is not None) != is_quantized(kv_pages.dtype):
            raise KernelError(
                name,
                None if value is None else f"{value.dtype}{value.shape}",
                f"given exactly for int8 and float8_e4m3fn pages, these are {kv_pages.dtype}",
            )
        if value is not None and not is_scale(value, whole):
            raise KernelError(name, f"{value.dtype}{value.shape}", SCALES_TEXT.format(list(whole)))
    if k_scale is not None and v_scale is not None and k_scale.ndim != v_scale.ndim:
        raise KernelError("v_scale.shape", v_scale.shape, f"that of k_scale, {k_scale.shape}")


def check_queries(q: jax.Array, query_lens: jax.Array | None) -> None:
    """Refuses queries of a wrong rank or number, and numbers of queries that do not fit them.

    Raises:
        KernelError: one is refused.
    """
    if q.ndim not in (3, 4):
        raise KernelError(
            "q.shape", q.shape, "[rows, heads, head_dim] or [rows, queries, heads, head_dim]"
        )
    if q.ndim == 4 and not 1 <= q.shape[1] <= MAX_QUERIES:
        raise KernelError("q.shape", q.shape, f"1 to {MAX_QUERIES} queries a row, the second axis")
    if query_lens is None:
        return
    if q.ndim == 3:
        raise KernelError(
            "query_lens",
            f"{query_lens.dtype}{query_lens.shape}",
            "None, or with q [rows, queries, heads, head_dim]",
        )
    check_array("query_lens", query_lens, jnp.int32, q.shape[:1])


def with_query_lens(
    q: jax.Array,  # [B, Q, H, D]
    kv_lens: jax.Array,  # int32[B]
    query_lens: jax.Array | None,  # int32[B]
    options: AttentionOptions,
) -> tuple[jax.Array, AttentionOptions]:
    """The lengths and options as backends take them: of one query a row, none means an idle row."""
    if query_lens is not None and q.shape[1] == 1:
        return jnp.where(query_lens > 0, kv_lens, 0), options
    return kv_lens, replace(options, query_lens=query_lens)


def check_slots(q: jax.Array, page_table: jax.Array, kv_lens: jax.Array) -> None:
    """Refuses a page table or lengths that are not of the slots of q.

    Raises:
        KernelError: one is not.
    """
    check_array("kv_lens", kv_lens, jnp.int32, q.shape[:1])
    if page_table.shape[0] != q.shape[0]:
        raise KernelError("page_table.shape", page_table.shape, f"[{q.shape[0]}, pages]")

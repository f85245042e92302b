"""Decode attention that also writes the step's tokens into their pages: the public function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import coverage
from pallas_kernels.backends import resolve
from pallas_kernels.backends.record import Tuning
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.api import (
    check_queries,
    check_slots,
    checked_options,
    with_query_lens,
)
from pallas_kernels.paged_attention.queries import query_ends
from pallas_kernels.pages import whole_heads
from pallas_kernels.write_kv.api import stored_rows, write_kv


def paged_decode_and_write(
    q: jax.Array,  # [B, H, D] or [B, Q, H, D]
    k: jax.Array,  # [B, KVH, D] or [B, Q, KVH, D]
    v: jax.Array,  # [B, KVH, D] or [B, Q, KVH, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    *,
    query_lens: jax.Array | None = None,  # int32[B]
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,  # float32[H]
    k_scale: jax.Array | None = None,  # float32[]
    v_scale: jax.Array | None = None,
    first_page: int | jax.Array = 0,
    backend: str,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # [B, H, D] or [B, Q, H, D], [NP, page_size, 2, KVH, D]
    """`write_kv` of each slot's new tokens, then `paged_decode_attention`: on a TPU in one kernel.

    The new tokens of slot b are its queries, n = query_lens[b] of them, and its last tokens: token
    kv_lens[b] - n + i has key k[b, i] and value v[b, i], and they go where the page table says that
    it lies. No other slot may name that page. The pool is updated in place when the caller's jit
    donates it. An idle slot has no token; page `first_page` must be one that is never read, because
    a backend may write there for tokens that a slot does not have.

    Args:
        q: as for `paged_decode_attention`.
        k: keys of the queries' tokens, float32, float16 or bfloat16; rounded to the type of the
            pool.
        v: values, of the type of `k`.
        kv_pages: the pool, as for `paged_decode_attention`.
        page_table: as for `paged_decode_attention`.
        kv_lens: tokens of each slot, the new ones included; 0 = idle, gives zeros.
        query_lens: how many of the Q tokens each slot has, as for `paged_decode_attention`.
        scale, soft_cap, window, sinks, first_page: as for `paged_decode_attention`.
        k_scale: scale of the stored keys; given exactly for 8-bit pages.
        v_scale: likewise for the values.
        backend: "mosaic_tpu" (TPU, one kernel), or "xla" (any device) and "reference", which call
            the two operations.
        tuning: tile sizes of the TPU kernel; None takes the defaults.
        interpret: parameters of the interpreter of the TPU kernel; None compiles it.

    Returns:
        Attention output in the type of q, and the pool with the new tokens.

    Raises:
        KernelError: a shape, a dtype or the backend is not supported; names it.
    """
    chosen = resolve("decode_and_write", backend)
    check_queries(q, query_lens)
    queries = q if q.ndim == 4 else q[:, None]
    options = checked_options(
        queries, kv_pages, page_table, scale, soft_cap, window, sinks, k_scale, v_scale, first_page
    )
    check_slots(queries, page_table, kv_lens)
    width = kv_pages.shape[4]
    head_rows = q.shape[-1] // width
    for name, part in (("k", k), ("v", v)):
        if part.ndim != q.ndim or part.shape[:-2] != q.shape[:-2]:
            rows = ", ".join(map(str, q.shape[:-2]))
            raise KernelError(f"{name}.shape", part.shape, f"[{rows}, kv_heads, head_dim], as q")
        if part.shape[-1] != q.shape[-1]:
            raise KernelError(f"{name}.shape", part.shape, f"heads of {q.shape[-1]}, as q")
    # as rows of the pool, [B * Q, KVH, D] but for heads of several rows
    k, v = (part.reshape(-1, part.shape[-2] * head_rows, width) for part in (k, v))
    kv_lens, options = with_query_lens(queries, kv_lens, query_lens, options)
    of_kernel = chosen.options(tuning=tuning, interpret=interpret)
    if chosen.interprets:
        coverage.require(chosen.covers, backend, q, kv_pages, k_scale)
        new = stored_rows(kv_pages, k, v, k_scale, v_scale)
        out, kv_pages = chosen.load().decode_and_write(
            queries, new, kv_pages, page_table, kv_lens, options, **of_kernel
        )
        return out.reshape(q.shape), kv_pages
    page_size = kv_pages.shape[1]
    ends = query_ends(kv_lens, options.query_lens, queries.shape[1])  # [B, Q]
    last = jnp.maximum(ends - 1, 0)
    pages = jnp.take_along_axis(page_table, last // page_size, axis=1)
    kv_pages = write_kv(
        kv_pages,
        k,
        v,
        first_page + jnp.where(ends > 0, pages, 0).reshape(-1),
        (last % page_size).reshape(-1),
        k_scale=k_scale,
        v_scale=v_scale,
        backend=backend,
    )
    attend = chosen.load().decode
    whole = whole_heads(kv_pages, q.shape[-1])
    return attend(queries, whole, page_table, kv_lens, options).reshape(q.shape), kv_pages

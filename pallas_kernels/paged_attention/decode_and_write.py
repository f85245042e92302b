"""Decode attention that also writes the step's tokens into their pages: the public function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.api import (
    DECODE_MODULES,
    check_queries,
    check_slots,
    checked_options,
    kernel_options,
    resolve,
)
from pallas_kernels.tuning import DecodeTuning
from pallas_kernels.write_kv.api import stored_rows, write_kv

BACKENDS = ("mosaic_tpu", "xla", "reference")


def paged_decode_and_write(
    q: jax.Array,  # [B, H, D]
    k: jax.Array,  # [B, KVH, D]
    v: jax.Array,  # [B, KVH, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,  # float32[H]
    k_scale: jax.Array | None = None,  # float32[]
    v_scale: jax.Array | None = None,
    first_page: int = 0,
    backend: str,
    tuning: DecodeTuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # [B, H, D], [NP, page_size, 2, KVH, D]
    """`write_kv` of one new token a slot, then `paged_decode_attention`: on a TPU in one kernel.

    The new token of slot b is its last, kv_lens[b] - 1: its key and value are k[b] and v[b], and
    they go where the page table says that it lies. No other slot may name that page. The pool is
    updated in place when the caller's jit donates it. An idle slot has no token; page `first_page`
    must be one that nobody reads, because a backend may write there for it.

    Args:
        q: as for `paged_decode_attention`.
        k: keys, float32, float16 or bfloat16; rounded to the type of the pool.
        v: values, of the type of `k`.
        kv_pages: the pool, as for `paged_decode_attention`.
        page_table: as for `paged_decode_attention`.
        kv_lens: tokens that each slot sees, the new one included; 0 = idle, gives zeros.
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
    if backend not in BACKENDS:
        raise KernelError("backend", repr(backend), f"one of {', '.join(BACKENDS)}")
    check_queries(q, None)
    if q.ndim != 3:
        raise KernelError("q.shape", q.shape, "[rows, heads, head_dim]")
    options = checked_options(
        q, kv_pages, page_table, scale, soft_cap, window, sinks, k_scale, v_scale, first_page
    )
    check_slots(q, page_table, kv_lens)
    if k.shape[:1] != q.shape[:1]:
        raise KernelError("k.shape", k.shape, f"[{q.shape[0]}, kv_heads, head_dim]")
    of_kernel = kernel_options(backend, {"tuning": tuning, "interpret": interpret})
    if backend == "mosaic_tpu":
        from pallas_kernels.paged_attention import mosaic_tpu_decode

        new = stored_rows(kv_pages, k, v, k_scale, v_scale)
        return mosaic_tpu_decode.decode_and_write(
            q, new, kv_pages, page_table, kv_lens, options, **of_kernel
        )
    page_size = kv_pages.shape[1]
    last = jnp.maximum(kv_lens - 1, 0)
    pages = jnp.take_along_axis(page_table, (last // page_size)[:, None], axis=1)[:, 0]
    kv_pages = write_kv(
        kv_pages,
        k,
        v,
        first_page + jnp.where(kv_lens > 0, pages, 0),
        last % page_size,
        k_scale=k_scale,
        v_scale=v_scale,
        backend=backend,
    )
    attend = resolve(backend, DECODE_MODULES, "decode")
    return attend(q[:, None], kv_pages, page_table, kv_lens, options)[:, 0], kv_pages

"""Paged attention: the public functions, their checks and the explicit choice of a backend.

Backends take `first_page` as an operand and are jitted, so the layers of a model share one trace
and one compiled kernel instead of having one each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import reference, xla, xla_prefill
from pallas_kernels.pages import FLOAT_DTYPES, POOL_DTYPES

DECODE_BACKENDS = ("reference", "xla", "mosaic_gpu")
PREFILL_BACKENDS = ("reference", "xla")


class PrefillLanes(NamedTuple):
    """Which rows of a packed prefill region belong to which request; a lane is a row of its table.

    Lane n owns rows [start, start + length) of the region; they are the tokens at the absolute
    positions context .. context + length - 1. A lane of length 0 is unused. Lanes do not overlap.
    """

    start: jax.Array  # int32[N]
    length: jax.Array  # int32[N]
    context: jax.Array  # int32[N]


def _check_common(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    window: int | None,
    first_page: int,
) -> None:
    if q.ndim != 3:
        raise KernelError("q.shape", q.shape, "[rows, heads, head_dim]")
    if q.dtype not in FLOAT_DTYPES:
        raise KernelError("q.dtype", q.dtype, "float32, float16 or bfloat16")
    if kv_pages.ndim != 5 or kv_pages.shape[2] != 2 or kv_pages.shape[4] != q.shape[2]:
        raise KernelError(
            "kv_pages.shape", kv_pages.shape, f"[pages, page_size, 2, kv_heads, {q.shape[2]}]"
        )
    if kv_pages.dtype not in POOL_DTYPES:
        raise KernelError(
            "kv_pages.dtype", kv_pages.dtype, "float32, float16, bfloat16 or uint16 (its bits)"
        )
    if q.shape[1] % kv_pages.shape[3]:
        raise KernelError(
            "q.shape", q.shape, f"the heads are a multiple of the {kv_pages.shape[3]} KV heads"
        )
    if page_table.ndim != 2 or page_table.dtype != jnp.int32:
        raise KernelError(
            "page_table", f"{page_table.dtype}{page_table.shape}", "int32[rows or lanes, pages]"
        )
    if window is not None and window < 1:
        raise KernelError("window", window, "None, or at least 1 token")
    if not 0 <= first_page < kv_pages.shape[0]:
        raise KernelError("first_page", first_page, f"a page of the pool, < {kv_pages.shape[0]}")


def _check_vector(name: str, vector: jax.Array, size: int) -> None:
    if vector.shape != (size,) or vector.dtype != jnp.int32:
        raise KernelError(name, f"{vector.dtype}{vector.shape}", f"int32[{size}]")


def paged_decode_attention(
    q: jax.Array,  # [B, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    window: int | None = None,
    first_page: int = 0,
    backend: str,
    interpret: Any = None,
) -> jax.Array:  # [B, H, D]
    """Attention of one query token a slot over the tokens that its page table row names.

    Token t of slot b lies in page `first_page + page_table[b, t // page_size]` at offset
    `t % page_size`, keys at index 0 and values at index 1 of the third axis. Head h reads KV head
    `h // (H // KVH)`. Everything in the pool that no slot may see may hold any bits, NaN too.

    Args:
        q: queries, rotary embedding applied; float32, float16 or bfloat16.
        kv_pages: the pool: float32, float16, bfloat16, or uint16 that holds bfloat16 bits.
        page_table: page ids, each below NP - first_page; entries past a slot's length are ignored
            but must be valid page ids.
        kv_lens: tokens that each slot sees, the current one included; 0 = idle, gives zeros.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: sliding window in tokens: key j is visible when position - j < window.
        first_page: added to every page id (layer * pages_per_layer in a pool of all layers).
        backend: "xla" (any device), "mosaic_gpu" (NVIDIA Hopper) or "reference".
        interpret: for "mosaic_gpu" only: the parameters of JAX's Mosaic GPU interpreter.

    Returns:
        Attention output in the type of q.

    Raises:
        KernelError: a shape, a dtype or the backend is not supported; names it.
    """
    _check_common(q, kv_pages, page_table, window, first_page)
    base = jnp.int32(first_page)
    _check_vector("kv_lens", kv_lens, q.shape[0])
    if page_table.shape[0] != q.shape[0]:
        raise KernelError("page_table.shape", page_table.shape, f"[{q.shape[0]}, pages]")
    if interpret is not None and backend != "mosaic_gpu":
        raise KernelError("interpret", interpret, 'an option of backend="mosaic_gpu" only')
    if backend == "reference":
        run = reference.decode
    elif backend == "xla":
        run = xla.decode
    elif backend == "mosaic_gpu":
        # imported where it is used: Mosaic GPU costs a third of a second and exists for GPUs only
        from pallas_kernels.paged_attention import mosaic_gpu

        return mosaic_gpu.decode(
            q,
            kv_pages,
            page_table,
            kv_lens,
            scale=scale,
            window=window,
            first_page=base,
            interpret=interpret,
        )
    else:
        raise KernelError("backend", repr(backend), f"one of {', '.join(DECODE_BACKENDS)}")
    return run(q, kv_pages, page_table, kv_lens, scale=scale, window=window, first_page=base)


def paged_prefill_attention(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    *,
    scale: float,
    window: int | None = None,
    first_page: int = 0,
    backend: str,
) -> jax.Array:  # [C, H, D]
    """Causal attention of chunks of several requests, packed in one region of C query rows.

    The keys and values of the chunks themselves are already in the pages, so a row at position p
    sees the tokens 0 .. p of its lane's page table row (all of its earlier context included).

    Args:
        q: queries, rotary embedding applied; float32, float16 or bfloat16.
        kv_pages: the pool: float32, float16, bfloat16, or uint16 that holds bfloat16 bits.
        page_table: page ids, one row a lane, each below NP - first_page.
        lanes: the rows and positions of each lane; see PrefillLanes.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: sliding window in tokens: key j is visible when position - j < window.
        first_page: added to every page id (layer * pages_per_layer in a pool of all layers).
        backend: "xla" (any device) or "reference".

    Returns:
        Attention output in the type of q; rows that no lane owns are zero.

    Raises:
        KernelError: a shape, a dtype or the backend is not supported; names it.
    """
    _check_common(q, kv_pages, page_table, window, first_page)
    base = jnp.int32(first_page)
    for name, vector in zip(PrefillLanes._fields, lanes):
        _check_vector(f"lanes.{name}", vector, page_table.shape[0])
    if backend == "reference":
        run = reference.prefill
    elif backend == "xla":
        run = xla_prefill.prefill
    else:
        raise KernelError("backend", repr(backend), f"one of {', '.join(PREFILL_BACKENDS)}")
    return run(q, kv_pages, page_table, *lanes, scale=scale, window=window, first_page=base)

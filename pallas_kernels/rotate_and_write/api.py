"""rotate_and_write: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import coverage
from pallas_kernels.backends import resolve
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.linear.api import Norm
from pallas_kernels.pages import FLOAT_DTYPES, POOL_DTYPES, POOL_DTYPES_TEXT


def rotate_and_write(
    qkv: jax.Array,  # [S, T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    dtype: DTypeLike,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    first_page: int | jax.Array = 0,
    backend: str,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # [T, KVH * G, D], [NP, page_size, 2, KVH, D]
    """Adds S parts of a fused projection, then `split_rotate` and `write_kv`: on a GPU one kernel.

    The pool is updated in place when the caller's jit donates it. Several padding tokens may share
    one place: its content is then any of theirs.

    Args:
        qkv: parts of the projection, which are added in float32 and rounded to `dtype`: for each
            KV head its G query heads, its key and its value.
        cos, sin: cosine and sine of each token's angles.
        kv_pages: the pool: float32, float16, bfloat16 or uint16 (bfloat16 bits).
        page_ids: each token's page, in [0, NP - first_page).
        offsets: place of each token within its page, in [0, page_size).
        dtype: of the queries: float32, float16 or bfloat16.
        q_norm, k_norm: RMS norm over D before the rotation; weights of type `dtype`.
        first_page: added to every page id.
        backend: "triton" (NVIDIA GPUs) or "xla" (any device, two operations).
        interpret: True runs the kernel in Pallas' interpreter; None compiles it.

    Returns:
        The rotated queries, contiguous, and the pool with the T rows replaced.

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    rounded = jnp.dtype(dtype)
    _check(qkv, cos, sin, kv_pages, page_ids, offsets, rounded)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_array(f"{name}.weight", norm.weight, rounded, qkv.shape[4:])
    if isinstance(first_page, int) and not 0 <= first_page < kv_pages.shape[0]:
        raise KernelError("first_page", first_page, f"a page of the pool, < {kv_pages.shape[0]}")
    chosen = resolve("rotate_and_write", backend)
    of_kernel = chosen.options(interpret=interpret)
    if chosen.interprets:
        shape = coverage.AttentionShape(
            head_dim=qkv.shape[4],
            page_size=kv_pages.shape[1],
            group=qkv.shape[3] - 2,
            pool_dtype=jnp.dtype(kv_pages.dtype),
            query_dtype=rounded,
            kv_heads=qkv.shape[2],
        )
        coverage.refuse(chosen.covers(shape), backend, qkv, kv_pages)
    return chosen.load().rotate_and_write(
        qkv,
        cos,
        sin,
        kv_pages,
        page_ids,
        offsets,
        jnp.int32(first_page),
        dtype=rounded,
        q_norm=q_norm,
        k_norm=k_norm,
        **of_kernel,
    )


def _check(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    dtype: jnp.dtype,
) -> None:
    if qkv.ndim != 5 or qkv.shape[3] < 3 or qkv.shape[4] % 2:
        raise KernelError(
            "qkv.shape", qkv.shape, "[parts, tokens, kv_heads, group + 2, even head_dim]"
        )
    if dtype not in FLOAT_DTYPES:
        raise KernelError("dtype", dtype, "float32, float16 or bfloat16")
    if qkv.dtype not in (dtype, jnp.float32):
        raise KernelError("qkv.dtype", qkv.dtype, f"float32 or {dtype}")
    _, tokens, kv_heads, _, head_dim = qkv.shape
    for name, table in (("cos", cos), ("sin", sin)):
        check_array(name, table, jnp.float32, (tokens, head_dim // 2))
    if kv_pages.ndim != 5 or kv_pages.shape[2:] != (2, kv_heads, head_dim):
        raise KernelError(
            "kv_pages.shape", kv_pages.shape, f"[pages, page_size, 2, {kv_heads}, {head_dim}]"
        )
    if kv_pages.dtype not in POOL_DTYPES:
        raise KernelError("kv_pages.dtype", kv_pages.dtype, POOL_DTYPES_TEXT)
    for name, index in (("page_ids", page_ids), ("offsets", offsets)):
        check_array(name, index, jnp.int32, (tokens,))

"""Writing new keys and values into the page pool: the public function and its dispatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.errors import KernelError
from pallas_kernels.pages import BFLOAT16_BITS, FLOAT_DTYPES, POOL_DTYPES, value_dtype
from pallas_kernels.write_kv import reference, xla

BACKENDS = {"reference": reference.write, "xla": xla.write}


def write_kv(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    backend: str,
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """Writes the keys and values of T tokens into their pages.

    The pool is updated in place when the caller's jit donates it. Tokens that are only padding
    go to a page that nobody reads (page 0 of a layer); several of them may share one place, whose
    content is then any of theirs.

    Args:
        kv_pages: the pool: float32, float16, bfloat16, or uint16 that holds bfloat16 bits.
        k: keys, float32, float16 or bfloat16; rounded to the type of the pool.
        v: values, of the type of `k`.
        page_ids: index of each token's page in the pool, in [0, NP): a layer's offset included.
        offsets: place of each token within its page, in [0, page_size).
        backend: "xla" or "reference".

    Returns:
        The pool with the T rows replaced.

    Raises:
        KernelError: a shape, dtype or the backend is not supported; names it.
    """
    if kv_pages.ndim != 5 or kv_pages.shape[2] != 2:
        raise KernelError("kv_pages.shape", kv_pages.shape, "[pages, page_size, 2, kv_heads, D]")
    if kv_pages.dtype not in POOL_DTYPES:
        raise KernelError(
            "kv_pages.dtype", kv_pages.dtype, "float32, float16, bfloat16 or uint16 (its bits)"
        )
    if k.ndim != 3 or k.shape[1:] != kv_pages.shape[3:]:
        raise KernelError("k.shape", k.shape, f"[tokens, {kv_pages.shape[3]}, {kv_pages.shape[4]}]")
    if v.shape != k.shape:
        raise KernelError("v.shape", v.shape, f"the shape of k, {k.shape}")
    if k.dtype not in FLOAT_DTYPES or v.dtype != k.dtype:
        raise KernelError(
            "k.dtype, v.dtype", f"{k.dtype}, {v.dtype}", "both one of float32, float16, bfloat16"
        )
    for name, index in (("page_ids", page_ids), ("offsets", offsets)):
        if index.shape != k.shape[:1] or index.dtype != jnp.int32:
            raise KernelError(name, f"{index.dtype}{index.shape}", f"int32[{k.shape[0]}]")
    if backend not in BACKENDS:
        raise KernelError("backend", repr(backend), f"one of {', '.join(BACKENDS)}")
    rows = jnp.stack([k, v], axis=1).astype(value_dtype(kv_pages))
    if kv_pages.dtype == BFLOAT16_BITS:
        rows = lax.bitcast_convert_type(rows, jnp.uint16)
    return BACKENDS[backend](kv_pages, rows, page_ids, offsets)

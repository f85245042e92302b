"""Writing new keys and values into the page pool: the public functions and their dispatch."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.devices import PLAIN
from pallas_kernels.errors import KernelError
from pallas_kernels.pages import (
    FLOAT_DTYPES,
    LARGEST,
    POOL_DTYPES,
    POOL_DTYPES_TEXT,
    as_stored,
    is_quantized,
    quantized,
    value_dtype,
)

MODULES = {name: name for name in ("reference", "xla", "xla_pages", "mosaic_tpu")}


class ScaledPages(NamedTuple):
    """A pool of 8-bit pages with a scale for each page and KV head."""

    kv_pages: jax.Array  # [NP, page_size, 2, KVH, D]
    k_scale: jax.Array  # float32[NP, KVH]
    v_scale: jax.Array  # float32[NP, KVH]


def write_kv(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    k_scale: jax.Array | None = None,  # float32[]
    v_scale: jax.Array | None = None,  # float32[]
    first_page: int = 0,
    backend: str,
    interpret: Any = None,
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """Writes the keys and values of T tokens into their pages.

    The pool is updated in place when the caller's jit donates it. Tokens that are only padding
    go to a page that nobody reads (page 0 of a layer); several of them may share one place, whose
    content is then any of theirs.

    Args:
        kv_pages: the pool: float32, float16, bfloat16, int8, float8_e4m3fn, uint16 (bfloat16 bits)
            or uint8 (float8_e4m3fn bits).
        k: keys, float32, float16 or bfloat16; rounded to the type of the pool.
        v: values, of the type of `k`.
        page_ids: each token's page, in [0, NP - first_page).
        offsets: place of each token within its page, in [0, page_size).
        k_scale: given exactly for 8-bit pages: a key is stored as `key / k_scale`, rounded, and
            cut off at the largest number of the type. For a scale a page see `write_kv_scaled`.
        v_scale: likewise for the values.
        first_page: added to every page id (layer * pages_per_layer in a pool of all layers).
        backend: "native" (CPU, C++), "xla" (any device), "xla_pages" (any device, by whole pages),
            "mosaic_tpu" (TPU) or "reference".
        interpret: parameters of the interpreter of a TPU kernel; None compiles it.

    Returns:
        The pool with the T rows replaced.

    Raises:
        KernelError: a shape, dtype or the backend is not supported; names it.
    """
    _check(kv_pages, k, v)
    _check_scales(kv_pages, k_scale, v_scale)
    _check_places(k, page_ids, offsets)
    if not 0 <= first_page < kv_pages.shape[0]:
        raise KernelError("first_page", first_page, f"a page of the pool, < {kv_pages.shape[0]}")
    if backend == "native":
        if interpret is not None:
            raise KernelError("interpret", interpret, "not an option of backend='native'")
        if k_scale is None or v_scale is None:
            k, v = (x.astype(value_dtype(kv_pages.dtype)) for x in (k, v))
        else:
            k, v = (quantized(x, s, kv_pages.dtype) for x, s in ((k, k_scale), (v, v_scale)))
        return _write_native(kv_pages, k, v, page_ids, offsets, first_page)
    rows = stored_rows(kv_pages, k, v, k_scale, v_scale)
    if first_page:
        page_ids = page_ids + first_page
    return _module(backend, interpret).write(kv_pages, rows, page_ids, offsets, **_given(interpret))


def write_kv_scaled(
    pages: ScaledPages,
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    backend: str,
) -> ScaledPages:
    """Writes tokens into 8-bit pages whose scale, by page and KV head, follows their content.

    A page's scale is the smallest that holds all that was written to it since its first place
    (offset 0), at which a page begins anew. Where a token needs a larger scale, what the page
    holds is rounded again to that scale. Pages that several requests share are full and never
    written.

    Args:
        pages: the pool and its scales; updated in place when the caller's jit donates them.
        k: keys, float32, float16 or bfloat16.
        v: values, of the type of `k`.
        page_ids: as for `write_kv`.
        offsets: as for `write_kv`.
        backend: as for `write_kv`.

    Raises:
        KernelError: a shape, dtype or the backend is not supported; names it.
    """
    kv_pages, k_scale, v_scale = pages
    _check(kv_pages, k, v)
    _check_places(k, page_ids, offsets)
    if not is_quantized(kv_pages.dtype):
        raise KernelError("kv_pages.dtype", kv_pages.dtype, "int8, float8_e4m3fn or uint8")
    whole = (kv_pages.shape[0], kv_pages.shape[3])
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.shape != whole or scale.dtype != jnp.float32:
            raise KernelError(name, f"{scale.dtype}{scale.shape}", f"float32{list(whole)}")
    # pages whose scale grows are few: their rounding is XLA's, whoever writes the new rows
    module = _module("xla" if backend == "native" else backend, None)
    values = jnp.stack([k, v], axis=1).astype(jnp.float32)  # [T, 2, KVH, D]
    needed = jnp.abs(values).max(axis=-1) / LARGEST[value_dtype(kv_pages.dtype).name]

    old = jnp.stack([k_scale, v_scale], axis=1)  # [NP, 2, KVH]
    beginning = jnp.where(offsets == 0, page_ids, whole[0])  # the others are dropped
    old = old.at[beginning].set(0.0, mode="drop")
    new = old.at[page_ids].max(needed)
    kv_pages = module.rescale(kv_pages, old, new, page_ids)
    rows = quantized(values, new[page_ids][..., None], kv_pages.dtype)
    if backend == "native":
        kv_pages = _write_native(kv_pages, rows[:, 0], rows[:, 1], page_ids, offsets)
    else:
        kv_pages = module.write(kv_pages, rows, page_ids, offsets)
    return ScaledPages(kv_pages, new[:, 0], new[:, 1])


def _write_native(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    first_page: int = 0,
) -> jax.Array:
    """Keys and values apart, `first_page` an operand: the layers share one trace."""
    from pallas_kernels.write_kv import native

    return native.write(kv_pages, k, v, page_ids, offsets, jnp.int32(first_page))


def _module(backend: str, interpret: Any) -> Any:
    if backend not in MODULES:
        raise KernelError("backend", repr(backend), f"one of native, {', '.join(MODULES)}")
    if interpret is not None and backend in PLAIN:
        raise KernelError("interpret", interpret, f"not an option of backend={backend!r}")
    return importlib.import_module(f"pallas_kernels.write_kv.{MODULES[backend]}")


def _given(interpret: Any) -> dict[str, Any]:
    return {} if interpret is None else {"interpret": interpret}


def stored_rows(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    k_scale: jax.Array | None,  # float32[]
    v_scale: jax.Array | None,
) -> jax.Array:  # [T, 2, KVH, D]
    """Keys and values as the pool holds them: rounded to its type, over the scales if it is 8-bit.

    Raises:
        KernelError: a shape or dtype is not supported, or scales do not fit the pool.
    """
    _check(kv_pages, k, v)
    _check_scales(kv_pages, k_scale, v_scale)
    rows = jnp.stack([k, v], axis=1)
    if k_scale is None or v_scale is None:
        return as_stored(rows.astype(value_dtype(kv_pages.dtype)), kv_pages.dtype)
    scales = jnp.stack([k_scale, v_scale])[None, :, None, None]
    return quantized(rows, scales, kv_pages.dtype)


def _check(kv_pages: jax.Array, k: jax.Array, v: jax.Array) -> None:
    if kv_pages.ndim != 5 or kv_pages.shape[2] != 2:
        raise KernelError("kv_pages.shape", kv_pages.shape, "[pages, page_size, 2, kv_heads, D]")
    if kv_pages.dtype not in POOL_DTYPES:
        raise KernelError("kv_pages.dtype", kv_pages.dtype, POOL_DTYPES_TEXT)
    if k.ndim != 3 or k.shape[1:] != kv_pages.shape[3:]:
        raise KernelError("k.shape", k.shape, f"[tokens, {kv_pages.shape[3]}, {kv_pages.shape[4]}]")
    if v.shape != k.shape:
        raise KernelError("v.shape", v.shape, f"the shape of k, {k.shape}")
    if k.dtype not in FLOAT_DTYPES or v.dtype != k.dtype:
        raise KernelError(
            "k.dtype, v.dtype", f"{k.dtype}, {v.dtype}", "both one of float32, float16, bfloat16"
        )


def _check_scales(
    kv_pages: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != is_quantized(kv_pages.dtype):
            raise KernelError(
                name,
                None if scale is None else f"{scale.dtype}{scale.shape}",
                f"given exactly for int8 and float8_e4m3fn pages, these are {kv_pages.dtype}",
            )
        if scale is not None and (scale.shape != () or scale.dtype != jnp.float32):
            raise KernelError(name, f"{scale.dtype}{scale.shape}", "float32[]")


def _check_places(k: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> None:
    for name, index in (("page_ids", page_ids), ("offsets", offsets)):
        if index.shape != k.shape[:1] or index.dtype != jnp.int32:
            raise KernelError(name, f"{index.dtype}{index.shape}", f"int32[{k.shape[0]}]")

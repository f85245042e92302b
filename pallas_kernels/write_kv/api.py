"""Writing new keys and values into the page pool: the public functions and their dispatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backends import resolve
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.pages import (
    FLOAT_DTYPES,
    POOL_DTYPES,
    POOL_DTYPES_TEXT,
    SCALE_DTYPES,
    as_stored,
    is_quantized,
    quantized,
    row_scales,
    scales_shape,
    value_dtype,
)
from pallas_kernels.write_kv import xla_pages


class ScaledPages(NamedTuple):
    """A pool of 8-bit pages with a scale for each token and KV head."""

    kv_pages: jax.Array  # [NP, page_size, 2, KVH, D]
    k_scale: jax.Array  # bfloat16, or its bits, [NP, KVH, page_size]
    v_scale: jax.Array  # likewise


def write_kv(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    k_scale: jax.Array | None = None,  # float32[]
    v_scale: jax.Array | None = None,  # float32[]
    first_page: int | jax.Array = 0,
    backend: str,
    interpret: Any = None,
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """Writes the keys and values of T tokens into their pages.

    The pool is updated in place when the caller's jit donates it. Tokens that are only padding
    go to a page that is never read (page 0 of a layer); several of them may share one place: its
    content is then any of theirs.

    Args:
        kv_pages: the pool: float32, float16, bfloat16, int8, float8_e4m3fn, uint16 (bfloat16 bits)
            or uint8 (float8_e4m3fn bits).
        k: keys, float32, float16 or bfloat16; rounded to the type of the pool.
        v: values, of the type of `k`.
        page_ids: each token's page, in [0, NP - first_page).
        offsets: place of each token within its page, in [0, page_size).
        k_scale: given exactly for 8-bit pages: a key is stored as `key / k_scale`, rounded, and
            cut off at the largest number of the type. For a scale a token see `write_kv_scaled`.
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
    _check_first_page(kv_pages, first_page)
    chosen = resolve("write_kv", backend)
    of_kernel = chosen.options(interpret=interpret)
    if backend == "native":
        if k_scale is None or v_scale is None:
            k, v = (x.astype(value_dtype(kv_pages.dtype)) for x in (k, v))
        else:
            k, v = (quantized(x, s, kv_pages.dtype) for x, s in ((k, k_scale), (v, v_scale)))
        return _write_native(kv_pages, k, v, page_ids, offsets, first_page)
    rows = stored_rows(kv_pages, k, v, k_scale, v_scale)
    if not isinstance(first_page, int) or first_page:
        page_ids = page_ids + first_page
    return chosen.load().write(kv_pages, rows, page_ids, offsets, **of_kernel)


def write_kv_scaled(
    pages: ScaledPages,
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    first_page: int | jax.Array = 0,
    backend: str,
    interpret: Any = None,
) -> ScaledPages:
    """Writes tokens into 8-bit pages with a scale for each token and KV head.

    A scale is the smallest bfloat16 number with which its row of D elements fits 8 bits. What a
    token is stored as depends on its own key and value alone, and no other token is touched.

    Args:
        pages: the pool and its scales; updated in place when the caller's jit donates them.
        k: keys, float32, float16 or bfloat16.
        v: values, of the type of `k`.
        page_ids: as for `write_kv`, of the scales too.
        offsets: as for `write_kv`.
        first_page: as for `write_kv`.
        backend: as for `write_kv`; XLA writes the scales but for "native", by whole pages for the
            backends of a TPU, which want them held as rows [NP, KVH * page_size] of memory.
        interpret: as for `write_kv`.

    Raises:
        KernelError: a shape, dtype or the backend is not supported; names it.
    """
    kv_pages, k_scale, v_scale = pages
    _check(kv_pages, k, v)
    _check_places(k, page_ids, offsets)
    _check_first_page(kv_pages, first_page)
    if not is_quantized(kv_pages.dtype):
        raise KernelError("kv_pages.dtype", kv_pages.dtype, "int8, float8_e4m3fn or uint8")
    whole = scales_shape(kv_pages.shape)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.shape != whole or scale.dtype not in SCALE_DTYPES:
            raise KernelError(name, f"{scale.dtype}{scale.shape}", f"bfloat16{list(whole)}")
    chosen = resolve("write_kv", backend)
    of_kernel = chosen.options(interpret=interpret)
    if backend == "native":
        from pallas_kernels.write_kv import native

        first = jnp.int32(first_page)
        return ScaledPages(*native.write_scaled(*pages, k, v, page_ids, offsets, first))
    if not isinstance(first_page, int) or first_page:
        page_ids = page_ids + first_page
    scales = [row_scales(x, kv_pages.dtype) for x in (k, v)]
    rows = [quantized(x, s[..., None], kv_pages.dtype) for x, s in zip((k, v), scales, strict=True)]
    stacked = jnp.stack(rows, axis=1)
    kv_pages = chosen.load().write(kv_pages, stacked, page_ids, offsets, **of_kernel)
    if chosen.whole_pages:
        k_rows, v_rows = scales
        held: Any = xla_pages.write_scales(k_scale, v_scale, k_rows, v_rows, page_ids, offsets)
        return ScaledPages(kv_pages, *held)
    held = (
        of_pages.at[page_ids, :, offsets].set(
            as_stored(of_rows, of_pages.dtype), mode="promise_in_bounds"
        )
        for of_pages, of_rows in zip((k_scale, v_scale), scales, strict=True)
    )
    return ScaledPages(kv_pages, *held)


def _write_native(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    first_page: int | jax.Array,
) -> jax.Array:
    """Keys and values apart, `first_page` an operand: the layers share one trace."""
    from pallas_kernels.write_kv import native

    return native.write(kv_pages, k, v, page_ids, offsets, jnp.int32(first_page))


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


def _check_first_page(kv_pages: jax.Array, first_page: int | jax.Array) -> None:
    if isinstance(first_page, int) and not 0 <= first_page < kv_pages.shape[0]:
        raise KernelError("first_page", first_page, f"a page of the pool, < {kv_pages.shape[0]}")


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
        if scale is not None:
            check_array(name, scale, jnp.float32, ())


def _check_places(k: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> None:
    for name, index in (("page_ids", page_ids), ("offsets", offsets)):
        check_array(name, index, jnp.int32, k.shape[:1])

"""Writing new keys and values into the pages on the CPU in C++ (`pallas_kernels/native`)."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels import native
from pallas_kernels.compat import result_like


@jax.jit
def write(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    k: jax.Array,  # [T, KVH, D], elements as wide as the pool's
    v: jax.Array,  # [T, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    first_page: jax.Array,  # int32[]
) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """Copies rows of KVH * D elements; XLA:CPU would compile three kernels for every layer.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    native.require()
    pool = result_like(kv_pages, kv_pages.shape, kv_pages.dtype)
    call = jax.ffi.ffi_call("jaxserve_write_kv", pool, input_output_aliases={0: 0})
    return call(kv_pages, k, v, page_ids, offsets, first_page.reshape(1))


@jax.jit
def write_scaled(
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D], 8 bits
    k_scale: jax.Array,  # bfloat16 or uint16[NP, KVH, page_size]
    v_scale: jax.Array,
    k: jax.Array,  # [T, KVH, D]
    v: jax.Array,  # [T, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    first_page: jax.Array,  # int32[]
) -> Sequence[jax.Array]:
    """Rounds rows to 8 bits and writes them and their scales; returns the first three.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    native.require()
    pool = kv_pages, k_scale, v_scale
    results = [result_like(array, array.shape, array.dtype) for array in pool]
    aliases = {place: place for place in range(len(pool))}
    call = jax.ffi.ffi_call("jaxserve_write_kv_scaled", results, input_output_aliases=aliases)
    return call(*pool, k, v, page_ids, offsets, first_page.reshape(1))

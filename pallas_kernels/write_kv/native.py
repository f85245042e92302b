"""Writing new keys and values into the pages on the CPU in C++ (`pallas_kernels/native`)."""

from __future__ import annotations

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

"""Paged prefill attention on the CPU in C++ (`pallas_kernels/native`).

One work item a (tile of a lane's rows, KV head), latest positions first: the cost follows the live
rows and their contexts.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.native.operands import optional, score_attributes


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "window"))
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    start: jax.Array,  # int32[N]
    length: jax.Array,  # int32[N]
    context: jax.Array,  # int32[N]
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,  # float32[H]
    k_scale: jax.Array | None,  # float32[] or float32[NP, KVH]
    v_scale: jax.Array | None,
    first_page: jax.Array,  # int32[]
) -> jax.Array:  # [C, H, D]
    """Causal attention of packed chunks over pages that already hold the chunks themselves.

    Over bfloat16 pages queries and softmax weights are rounded to bfloat16; everything else is
    float32. Rows that no lane owns are zero.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    native.require()
    call = jax.ffi.ffi_call("jaxserve_paged_prefill", result_like(q, q.shape, q.dtype))
    return call(
        q,
        kv_pages,
        page_table,
        start,
        length,
        context,
        first_page.reshape(1),
        optional(sinks),
        optional(k_scale),
        optional(v_scale),
        **score_attributes(scale, soft_cap, window),
    )

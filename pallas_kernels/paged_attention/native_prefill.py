"""Paged prefill attention on the CPU in C++ (`pallas_kernels/native`).

One work item a (tile of a lane's rows, KV head), latest positions first: the cost follows the live
rows and their contexts.
"""

from __future__ import annotations

import jax

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.native.operands import optional, score_attributes
from pallas_kernels.paged_attention.options import AttentionOptions


@jax.jit
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    start: jax.Array,  # int32[N]
    length: jax.Array,  # int32[N]
    context: jax.Array,  # int32[N]
    options: AttentionOptions,
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
        options.first_page.reshape(1),
        optional(options.sinks),
        optional(options.k_scale),
        optional(options.v_scale),
        **score_attributes(*options.scores),
    )

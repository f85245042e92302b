"""Paged decode attention on the CPU in C++ (`pallas_kernels/native`).

One work item a (slot, KV head), the longest contexts first: the cost follows the live tokens, and
an idle slot costs nothing. Contexts that show more than 1,024 tokens are attended to in parts of
512 (Flash-Decoding, Dao et al. 2023), whatever the number of threads: results do not depend on it.
"""

from __future__ import annotations

import jax

from pallas_kernels import coverage, native
from pallas_kernels.compat import result_like
from pallas_kernels.coverage import AttentionShape
from pallas_kernels.native.operands import optional, score_attributes
from pallas_kernels.paged_attention.options import AttentionOptions


@jax.jit
def decode(
    q: jax.Array,  # [B, 1, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
) -> jax.Array:  # [B, 1, H, D]
    """Attention of one query row a slot.

    Over bfloat16 pages queries and softmax weights are rounded to bfloat16; everything else is
    float32.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    coverage.require(coverage.one_query(AttentionShape.of(q, kv_pages)), "native", q, kv_pages)
    native.require()
    q = q[:, 0]
    call = jax.ffi.ffi_call("jaxserve_paged_decode", result_like(q, q.shape, q.dtype))
    out = call(
        q,
        kv_pages,
        page_table,
        kv_lens,
        options.first_page.reshape(1),
        optional(options.sinks),
        optional(options.k_scale),
        optional(options.v_scale),
        **score_attributes(*options.scores),
    )
    return out[:, None]

"""Paged decode attention on the CPU in C++ (`pallas_kernels/native`).

One work item a (slot, KV head), the longest contexts first: the cost follows the live tokens, and
an idle slot costs nothing. The queries of a slot are rows of its items, as in prefill. Contexts
that show more than 1,024 tokens are attended to in parts of 512 (Flash-Decoding, Dao et al. 2023),
whatever the number of threads: results do not depend on it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.native.operands import optional, score_attributes
from pallas_kernels.paged_attention.options import AttentionOptions


@jax.jit
def decode(
    q: jax.Array,  # [B, Q, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[B, P]
    kv_lens: jax.Array,  # int32[B]
    options: AttentionOptions,
) -> jax.Array:  # [B, Q, H, D]
    """Attention of up to Q queries a slot.

    Over bfloat16 pages queries and softmax weights are rounded to bfloat16; everything else is
    float32.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    native.require()
    call = jax.ffi.ffi_call("jaxserve_paged_decode", result_like(q, q.shape, q.dtype))
    query_lens = options.query_lens
    return call(
        q,
        kv_pages,
        page_table,
        kv_lens,
        jnp.zeros((0,), jnp.int32) if query_lens is None else query_lens,
        options.first_page.reshape(1),
        optional(options.sinks),
        optional(options.k_scale),
        optional(options.v_scale),
        **score_attributes(*options.scores),
    )

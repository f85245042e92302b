"""Paged attention on the CPU in C++ (`pallas_kernels/native`).

Decode: one work item a (slot, KV head), the longest contexts first: the cost follows the live
tokens, and an idle slot costs nothing. The queries of a slot are rows of its items, as in prefill.
Contexts that show more than 1,024 tokens are attended to in parts of 512 (Flash-Decoding, Dao et
al. 2023), whatever the number of threads: results do not depend on it.

Prefill: one work item a (tile of a lane's rows, KV head), latest positions first: the cost follows
the live rows and their contexts. A row is attended to in the order, and in the parts, of a decode
row that sees as much, but in the matrix unit, which `row_invariant` and rows that see tokens behind
themselves leave alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.native.operands import given_scale, optional, score_attributes
from pallas_kernels.paged_attention.lanes import PrefillLanes
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

    Over bfloat16 pages, and over 8-bit ones with bfloat16 queries, queries and softmax weights are
    rounded to bfloat16; everything else is float32.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    query_lens = options.query_lens
    counts = jnp.zeros((0,), jnp.int32) if query_lens is None else query_lens
    return _attend("jaxserve_paged_decode", (q, kv_pages, page_table, kv_lens, counts), options)


@jax.jit
def prefill(
    q: jax.Array,  # [C, H, D]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_table: jax.Array,  # int32[N, P]
    lanes: PrefillLanes,
    options: AttentionOptions,
) -> jax.Array:  # [C, H, D]
    """Causal attention of packed chunks over pages that already hold the chunks themselves.

    Over bfloat16 pages, and over 8-bit ones with bfloat16 queries, queries and softmax weights are
    rounded to bfloat16; everything else is float32. Rows that no lane owns are zero.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    ahead = options.last_seen
    last_seen = jnp.zeros((0,), jnp.int32) if ahead is None else ahead
    operands = q, kv_pages, page_table, *lanes, last_seen
    invariant = np.bool_(options.row_invariant)
    return _attend("jaxserve_paged_prefill", operands, options, row_invariant=invariant)


def _attend(
    target: str, operands: tuple[jax.Array, ...], options: AttentionOptions, **attributes: np.bool_
) -> jax.Array:
    """Calls a kernel with its own operands, the queries first, and those of every attention."""
    native.require()
    q = operands[0]
    return jax.ffi.ffi_call(target, result_like(q, q.shape, q.dtype))(
        *operands,
        options.first_page.reshape(1),
        optional(options.sinks),
        given_scale(options.k_scale),
        given_scale(options.v_scale),
        **score_attributes(*options.scores),
        **attributes,
    )

"""Rotary position embedding on the CPU in C++ (`pallas_kernels/native`).

The tables are operands of the call, so they are computed once a step: XLA:CPU fuses them into every
layer and would compute each sine once for each head and layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.linear.api import Norm


def split_rotate(
    qkv: jax.Array,  # [T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    *,
    q_norm: Norm | None,
    k_norm: Norm | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, KVH * G, D], [T, KVH, D], [T, KVH, D]
    """As `pallas_kernels.rotary.split_rotate`.

    Raises:
        KernelError: the native kernels cannot be built or loaded on this machine.
    """
    native.require()
    tokens, kv_heads, parts, head_dim = qkv.shape
    key = result_like(qkv, (tokens, kv_heads, head_dim), qkv.dtype)
    query = result_like(qkv, (tokens, kv_heads * (parts - 2), head_dim), qkv.dtype)
    absent = jnp.zeros((0,), qkv.dtype)
    q, k, v = jax.ffi.ffi_call("jaxserve_split_rotate", (query, key, key))(
        qkv,
        cos,
        sin,
        absent if q_norm is None else q_norm.weight,
        absent if k_norm is None else k_norm.weight,
        q_eps=np.float32(0.0 if q_norm is None else q_norm.eps),
        k_eps=np.float32(0.0 if k_norm is None else k_norm.eps),
        q_offset=np.bool_(q_norm is not None and q_norm.offset),
        k_offset=np.bool_(k_norm is not None and k_norm.offset),
    )
    return q, k, v

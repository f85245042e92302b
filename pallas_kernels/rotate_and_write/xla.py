"""Rotation and write as the two operations they are, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.linear.api import Norm
from pallas_kernels.rotary.xla import split_rotate
from pallas_kernels.write_kv import write_kv


def rotate_and_write(
    qkv: jax.Array,  # [S, T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    kv_pages: jax.Array,  # [NP, page_size, 2, KVH, D]
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    first_page: jax.Array,  # int32[]
    *,
    dtype: jnp.dtype,
    q_norm: Norm | None,
    k_norm: Norm | None,
) -> tuple[jax.Array, jax.Array]:  # [T, KVH * G, D], [NP, page_size, 2, KVH, D]
    """As `pallas_kernels.rotate_and_write.rotate_and_write`."""
    whole = qkv.sum(axis=0, dtype=jnp.float32).astype(dtype)
    q, k, v = split_rotate(whole, cos, sin, q_norm=q_norm, k_norm=k_norm)
    return q, write_kv(kv_pages, k, v, page_ids + first_page, offsets, backend="xla")

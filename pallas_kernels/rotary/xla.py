"""Rotary position embedding in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.linear.api import Norm
from pallas_kernels.linear.xla import rms_norm


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates heads by their position, pairing dimension i with i + head_dim / 2.

    Args:
        x: [T, heads, head_dim].
        cos, sin: float32 [T, head_dim / 2].

    Returns:
        [T, heads, head_dim] in x's dtype; the rotation itself is done in float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def split_rotate(
    qkv: jax.Array,  # [T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    *,
    q_norm: Norm | None,
    k_norm: Norm | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [T, KVH * G, D], [T, KVH, D], [T, KVH, D]
    """As `pallas_kernels.rotary.split_rotate`."""
    tokens, kv_heads, parts, head_dim = qkv.shape
    group = parts - 2
    q = qkv[:, :, :group].reshape(tokens, kv_heads * group, head_dim)
    k, v = qkv[:, :, group], qkv[:, :, group + 1]
    if q_norm is not None:
        q = rms_norm(q, q_norm)
    if k_norm is not None:
        k = rms_norm(k, k_norm)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

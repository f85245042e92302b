"""Residual stream and norm in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.linear.api import Norm
from pallas_kernels.linear.xla import rms_norm


def residual_norm(
    residual: jax.Array,  # [T, E]
    product: jax.Array,  # [S, T, E]
    weight: jax.Array,  # [E]
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:  # [T, E], [T, E]
    """As `pallas_kernels.residual_norm.residual_norm`."""
    stream = residual + product.sum(axis=0, dtype=jnp.float32).astype(residual.dtype)
    return rms_norm(stream, Norm(weight, eps)), stream

"""Residual stream and norm in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.linear.api import Norm
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.quantized_matmul import Rounding, Rows


def residual_norm(
    residual: jax.Array,  # [T, E]
    product: jax.Array,  # [S, T, E]
    norm: Norm,
    *,
    behind: Norm | None,
    rounding: Rounding | None,
) -> tuple[Rows, jax.Array]:  # [T, E], [T, E]
    """As `pallas_kernels.residual_norm.residual_norm`."""
    total = product.sum(axis=0, dtype=jnp.float32).astype(residual.dtype)
    stream = residual + (total if behind is None else rms_norm(total, behind))
    normed = rms_norm(stream, norm)
    return (normed if rounding is None else rounding.of(normed)), stream

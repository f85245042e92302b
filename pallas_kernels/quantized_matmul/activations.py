"""Dynamic quantisation of activations: one symmetric scale a row, chosen from the row itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.formats import FP8, FP8_MAX, INT8_MAX


def _stretched(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """x [M, K] in float32 with rows stretched to -largest..largest, and what undoes it [M].

    By products: XLA may turn a quotient into one, and rounding must not depend on whether it does.
    """
    wide = x.astype(jnp.float32)
    highest = jnp.abs(wide).max(axis=1)
    factor = jnp.where(highest > 0.0, largest / highest, 1.0)
    scale = highest * jnp.float32(1.0 / largest)
    return jnp.clip(wide * factor[:, None], -largest, largest), scale


def quantize_rows_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [M, K] as (int8[M, K], float32[M]): x is about values * scale, rounded to nearest even."""
    stretched, scale = _stretched(x, INT8_MAX)
    return jnp.round(stretched).astype(jnp.int8), scale


def quantize_rows_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [M, K] as (float8_e4m3fn[M, K], float32[M]): x is about values * scale."""
    stretched, scale = _stretched(x, FP8_MAX)
    return stretched.astype(FP8), scale

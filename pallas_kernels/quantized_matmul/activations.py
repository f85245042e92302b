"""Dynamic quantisation of activations: one symmetric scale a row, chosen from the row itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.formats import FP8, FP8_MAX, INT8_MAX


def _row_scale(x: jax.Array, largest: float) -> jax.Array:
    highest = jnp.abs(x).max(axis=1)
    # a product: XLA may turn a division by a constant into one, and rounding must not depend on it
    return jnp.where(highest > 0.0, highest * jnp.float32(1.0 / largest), 1.0)


def quantize_rows_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [M, K] as (int8[M, K], float32[M]): x is about values * scale, rounded to nearest even."""
    wide = x.astype(jnp.float32)
    scale = _row_scale(wide, INT8_MAX)
    rounded = jnp.clip(jnp.round(wide / scale[:, None]), -INT8_MAX, INT8_MAX)
    return rounded.astype(jnp.int8), scale


def quantize_rows_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [M, K] as (float8_e4m3fn[M, K], float32[M]): x is about values * scale."""
    wide = x.astype(jnp.float32)
    scale = _row_scale(wide, FP8_MAX)
    # division may round the largest value up past 448, which converts to NaN
    scaled = jnp.clip(wide / scale[:, None], -FP8_MAX, FP8_MAX)
    return scaled.astype(FP8), scale

"""Quantisation of activations: a symmetric scale of each row's own, or one that is given."""

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


def quantize_static(x: jax.Array, scale: jax.Array, kind: str) -> jax.Array:
    """x [M, K] over a scale float32[1], rounded to "int8" or "fp8" and cut off at its ends."""
    # once, where XLA may do as it likes with a quotient
    stretched = x.astype(jnp.float32) * (1.0 / scale)
    if kind == "fp8":
        return jnp.clip(stretched, -FP8_MAX, FP8_MAX).astype(FP8)
    return jnp.clip(jnp.round(stretched), -INT8_MAX - 1, INT8_MAX).astype(jnp.int8)


def rounded_rows(
    x: jax.Array, activations: str, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """x [M, K] as a product takes it, and the scale float32[M] of rounded rows.

    `activations`: "float", "int8" or "fp8".
    """
    if activations == "float":
        return x, None
    return (quantize_rows_int8 if activations == "int8" else quantize_rows_fp8)(x, scale)


def quantize_rows_int8(x: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """x [M, K] as (int8[M, K], float32[M]): x is about values * scale, rounded to nearest even.

    `scale`: float32[1] of all rows; None: each row's own.
    """
    if scale is not None:
        return quantize_static(x, scale, "int8"), jnp.broadcast_to(scale, x.shape[:1])
    stretched, by_row = _stretched(x, INT8_MAX)
    return jnp.round(stretched).astype(jnp.int8), by_row


def quantize_rows_fp8(x: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """x [M, K] as (float8_e4m3fn[M, K], float32[M]), likewise."""
    if scale is not None:
        return quantize_static(x, scale, "fp8"), jnp.broadcast_to(scale, x.shape[:1])
    stretched, by_row = _stretched(x, FP8_MAX)
    return stretched.astype(FP8), by_row

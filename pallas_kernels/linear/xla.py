"""Linear layers in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.linear.api import Norm, as_stored
from pallas_kernels.quantized_matmul import Int8Weight, quantized_matmul


def linear(
    x: jax.Array,  # [M, K]
    weight: jax.Array,  # [N, K]
    *,
    scale: jax.Array | None,  # float32[N]
    bias: jax.Array | None,  # [N]
    norm: Norm | None,
    residual: jax.Array | None,  # [M, N]
    gated: bool,
    out_dtype: jnp.dtype,
    live: jax.Array | None = None,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.linear`; each stage is rounded to the type of x. All rows are computed."""
    rows = x if norm is None else rms_norm(x, norm)
    if scale is None:
        product = _dot(rows, weight)
    else:
        stored = Int8Weight(as_stored(weight, jnp.int8), scale)
        product = quantized_matmul(
            rows, stored, activations="int8", out_dtype="float32", backend="xla"
        )
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    if gated:
        rounded = product.astype(out_dtype)
        gate = jax.nn.silu(rounded[:, ::2].astype(jnp.float32)).astype(out_dtype)
        out = gate * rounded[:, 1::2]
    else:
        out = product.astype(out_dtype)
    return out if residual is None else residual + out


def rms_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """x [..., K] over its root mean square, in float32, rounded to x's dtype, times the weight."""
    wide = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + norm.eps)
    return (wide * factor).astype(x.dtype) * norm.weight


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

"""Linear layers in plain XLA, on any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

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
    rounds: bool = False,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.linear`; each stage is rounded to the type of x. All rows are computed.

    `rounds`: the product gives its float32 sums in the type of the result where nothing else is
    done to them in float32.
    """
    rows = x if norm is None else rms_norm(x, norm)
    if scale is None:
        product = dot(rows, weight, out_dtype if rounds and bias is None else jnp.float32)
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


def dot(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x [.., K] times weight [.., K], contracted on the last axes; the axes between are batches."""
    batch = tuple(range(1, x.ndim - 1))
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (x.ndim - 1,)), (batch, batch)),
        precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )

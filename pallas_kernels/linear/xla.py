"""Linear layers in plain XLA, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import OPERATIONS
from pallas_kernels.errors import KernelError
from pallas_kernels.linear.api import Norm, Weight, as_stored_weight
from pallas_kernels.native.weights import NativeWeight
from pallas_kernels.quantized_matmul import Fp8Weight, Int4Weight, Int8Weight, quantized_matmul
from pallas_kernels.quantized_matmul.activations import quantize_static
from pallas_kernels.quantized_matmul.coverage import MatmulShape


def linear(
    x: jax.Array,  # [M, K]
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None,  # float32[N]
    activations: str = "float",
    input_scale: jax.Array | None = None,  # float32[1]
    matmul: Sequence[str] = ("xla",),
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
    if isinstance(weight, NativeWeight):
        raise KernelError("weight", "NativeWeight", "a weight of quantized_matmul")
    wanted = out_dtype if rounds and bias is None else jnp.dtype("float32")
    if isinstance(weight, jax.Array) and scale is None:
        product = dot(rows, weight, wanted)
    else:
        if isinstance(weight, jax.Array):
            assert scale is not None
            activations = "int8"
            weight = Int8Weight(as_stored_weight(weight, jnp.int8), scale)
        if isinstance(weight, Int4Weight) and input_scale is not None:
            raise KernelError("input_scale", "given", "for weights of 8 bits")
        if (
            input_scale is not None
            and not isinstance(weight, Int4Weight)
            and not _has_product(weight, activations, matmul, rows)
        ):
            # 8 bits are exact in the type of x, and the scale can wait for the sums
            rows = quantize_static(rows, input_scale, activations).astype(rows.dtype)
            weight = weight._replace(scale=weight.scale * input_scale)
            activations, input_scale = "float", None
        shape = MatmulShape.of(rows, weight, activations)
        backend = next((b for b in matmul if OPERATIONS["matmul"][b].covers(shape) is None), "xla")
        product = quantized_matmul(
            rows,
            weight,
            activations=activations,
            out_dtype=wanted,
            input_scale=input_scale,
            backend=backend,
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


def _has_product(
    weight: Int8Weight | Fp8Weight, activations: str, matmul: Sequence[str], rows: jax.Array
) -> bool:
    """Whether a product of 8 bits with 8 bits is there, for this weight and these activations."""
    if isinstance(weight, Int8Weight):
        return activations == "int8"
    if activations != "fp8":
        return False
    shape = MatmulShape.of(rows, weight, activations)
    kernels = [one for one in (OPERATIONS["matmul"][name] for name in matmul) if one.interprets]
    return any(one.covers(shape) is None for one in kernels)


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

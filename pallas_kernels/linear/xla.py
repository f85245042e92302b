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
from pallas_kernels.quantized_matmul import (
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    RoundedRows,
    Rounding,
    Rows,
    quantized_matmul,
)
from pallas_kernels.quantized_matmul.activations import rounded_rows, split_rows
from pallas_kernels.quantized_matmul.api import check_operands
from pallas_kernels.quantized_matmul.coverage import MatmulShape
from pallas_kernels.quantized_matmul.splits import dequantizes


def linear(
    x: Rows,  # [M, K]
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
    is_plain = isinstance(weight, jax.Array) and scale is None and not isinstance(x, RoundedRows)
    if not is_plain and input_scale is None:
        operand, activations = _as_quantized(weight, scale), _activations(scale, activations)
        check_operands(x, operand, activations, out_dtype)
        shape = MatmulShape.of(x, operand, activations)
        whole = OPERATIONS["linear_layer"].get(_first(matmul, shape))
        if whole is not None:
            layer: jax.Array = whole.load().layer(
                x,
                operand,
                rounds=activations == "int8",
                norm=norm,
                bias=bias,
                gated=gated,
                residual=residual,
                out_dtype=out_dtype,
            )
            return layer
    rows = x if norm is None or isinstance(x, RoundedRows) else rms_norm(x, norm)
    wanted = out_dtype if rounds and bias is None else jnp.dtype("float32")
    if isinstance(weight, jax.Array) and isinstance(rows, jax.Array) and is_plain:
        product = dot(rows, weight, wanted)
    else:
        product = quantized_product(
            rows,
            weight,
            scale=scale,
            activations=activations,
            input_scale=input_scale,
            matmul=matmul,
            out_dtype=wanted,
        )
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    out = product.astype(out_dtype)
    out = gated_rows(out) if gated else out
    return out if residual is None else residual + out


def quantized_product(
    rows: Rows,  # [M, K]
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None,  # float32[N]
    activations: str,
    input_scale: jax.Array | None,  # float32[1]
    matmul: Sequence[str],
    out_dtype: jnp.dtype,
    in_parts: bool = False,
) -> jax.Array:  # [M, N], or [S, M, N] in parts
    """`quantized_matmul` by the first of the backends that covers the product.

    Many rows of a 4-bit weight are XLA's where a kernel would convert the weight for every tile.
    """
    operand, activations = _as_quantized(weight, scale), _activations(scale, activations)
    if isinstance(operand, Int4Weight) and input_scale is not None:
        raise KernelError("input_scale", "given", "for weights of 8 bits")
    chosen = rounding_of(
        weight,
        scale=scale,
        activations=activations,
        input_scale=input_scale,
        matmul=matmul,
        dtype=rows.dtype,
    )
    if chosen is None and input_scale is not None and not isinstance(operand, Int4Weight):
        # 8 bits are exact in the type of x, and the scale can wait for the sums
        values, _ = split_rows(rounded_rows(rows, activations, input_scale))
        rows = values.astype(rows.dtype)
        operand = operand._replace(scale=operand.scale * input_scale)
        activations, input_scale = "float", None
    shape = MatmulShape.of(rows, operand, activations)
    backend = _first(matmul, shape)
    every = OPERATIONS["matmul"][backend].converts_every
    if every and isinstance(operand, Int4Weight) and dequantizes(rows.shape[0], every):
        backend = "xla"  # which dequantises the weight, and multiplies what it has
        # when its turn comes: the weights of all layers would not fit
        rows, operand = jax.lax.optimization_barrier((rows, operand))
    return quantized_matmul(
        rows,
        operand,
        activations=activations,
        out_dtype=out_dtype,
        input_scale=input_scale,
        in_parts=in_parts,
        backend=backend,
    )


def rounding_of(
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None,  # float32[N]
    activations: str,
    input_scale: jax.Array | None,  # float32[1]
    matmul: Sequence[str],
    dtype: DTypeLike,
) -> Rounding | None:
    """What a product multiplies rows of `dtype` as, where it multiplies 8 bits with 8 bits; None
    where it takes them as they are."""
    if isinstance(weight, NativeWeight) or (isinstance(weight, jax.Array) and scale is None):
        return None
    activations = _activations(scale, activations)
    operand = _as_quantized(weight, scale)
    if activations == "float" or isinstance(operand, Int4Weight):
        return None
    if activations == "fp8" and input_scale is not None:
        inputs = jax.ShapeDtypeStruct((1, operand.values.shape[1]), dtype)
        shape = MatmulShape.of(inputs, operand, activations)
        kernels = [one for one in (OPERATIONS["matmul"][name] for name in matmul) if one.interprets]
        if all(one.covers(shape) is not None for one in kernels):
            return None
    return Rounding(activations, input_scale)


def gated_rows(both: jax.Array) -> jax.Array:
    """silu(gate) * up of [M, N], whose columns are gate and up in turn: [M, N / 2]."""
    gate = jax.nn.silu(both[:, ::2].astype(jnp.float32)).astype(both.dtype)
    return gate * both[:, 1::2]


def _first(matmul: Sequence[str], shape: MatmulShape) -> str:
    """The first backend of `quantized_matmul` that covers a product."""
    return next((b for b in matmul if OPERATIONS["matmul"][b].covers(shape) is None), "xla")


def _activations(scale: jax.Array | None, activations: str) -> str:
    return "int8" if scale is not None else activations


def _as_quantized(weight: Weight, scale: jax.Array | None) -> QuantizedWeight:
    if isinstance(weight, NativeWeight):
        raise KernelError("weight", "NativeWeight", "a weight of quantized_matmul")
    if not isinstance(weight, jax.Array):
        return weight
    if scale is None:
        raise KernelError("x", "rounded rows", "rows as they are for a weight in the type of x")
    return Int8Weight(as_stored_weight(weight, jnp.int8), scale)


def rms_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """The norm of x [..., K] over its last axis, in x's dtype."""
    wide = x.astype(jnp.float32)
    over = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + norm.eps)
    if norm.offset:
        return (over * (1.0 + norm.weight.astype(jnp.float32))).astype(x.dtype)
    return over.astype(x.dtype) * norm.weight


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

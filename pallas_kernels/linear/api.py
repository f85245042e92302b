"""linear: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.backends import OPERATIONS, resolve
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.native.paths import Path
from pallas_kernels.native.weights import NativeWeight
from pallas_kernels.pages import FLOAT_DTYPES
from pallas_kernels.quantized_matmul.activations import RoundedRows, Rounding, Rows
from pallas_kernels.quantized_matmul.formats import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    outputs_of,
)

EIGHT_BITS = (jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8))
Weight = jax.Array | QuantizedWeight | NativeWeight


class Norm(NamedTuple):
    """An RMS norm: x over its root mean square, times `weight`, rounded to the type of x before
    that and behind it (Zhang and Sennrich 2019).

    Attributes:
        offset: the factor is 1 + weight, in float32, and only the result is rounded (Gemma Team
            2024).
    """

    weight: jax.Array  # [K], in the type of x
    eps: float
    offset: bool = False


def stored_dtype(backend: str) -> DTypeLike:
    """The type in which a backend wants 8-bit weights: uint8 (the integer plus 128) for "native",
    because its dot instruction takes one unsigned operand, else int8."""
    linears = OPERATIONS["grouped_linear"] | OPERATIONS["linear"]
    return jnp.dtype(linears[backend].stores or jnp.int8)


def as_stored_weight(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """8-bit integers, int8 or uint8 plus 128, in the other of the two forms or their own."""
    if values.dtype == dtype:
        return values
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8) ^ np.uint8(0x80)
    return jax.lax.bitcast_convert_type(bits, dtype)


def linear(
    x: Rows,  # [M, K]
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None = None,  # float32[N]
    activations: str = "float",
    input_scale: jax.Array | None = None,  # float32[1]
    matmul: Sequence[str] = ("xla",),
    bias: jax.Array | None = None,  # [N]
    norm: Norm | None = None,
    residual: jax.Array | None = None,  # [M, N]
    gated: bool = False,
    out_dtype: DTypeLike | None = None,
    live: jax.Array | None = None,  # int32[R, 2]
    row_invariant: bool = False,
    backend: str,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """norm(x) @ weight.T + bias, then the gated activation, then the residual.

    Sums are float32; float32 weights are multiplied at full precision. With an 8-bit weight every
    row of (the normalised) x is rounded to 8-bit integers with a scale of its own and the sums are
    int32.

    Args:
        x: activations: float32, float16 or bfloat16; or such rows rounded as `rounding_of` says,
            where nothing norms them.
        weight: in the type of x; or an array of 8 bits, int8, or uint8 from `as_stored_weight`; or
            a quantised weight: a `NativeWeight` for "native", one of `quantized_matmul` for others.
        scale: given exactly for an array of 8 bits: what row n of it is multiplied with.
        activations: for a quantised weight: "float" multiplies (the normalised) x as it is, "int8"
            and "fp8" round it, as `quantized_matmul`, or by group for a `NativeWeight`.
        input_scale: of activations that are rounded with one scale for all of them; None: each row
            or group has its own.
        matmul: backends of `quantized_matmul`, the best first, of which the first that covers the
            product is taken.
        bias: in the type of x.
        norm: RMS norm of x before the product.
        residual: added to the result, in the type of the result.
        gated: outputs 2 i and 2 i + 1 are gate and up of the inner dimension i, and the result is
            silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020).
        out_dtype: type of the result; that of x by default.
        live: ranges [begin, end) of the rows that count, ascending; a backend may leave out the
            others: their results are finite and mean nothing. None: all rows.
        row_invariant: sum every row in one order, whatever M is, so that a row's result does not
            depend on the rows beside it; of "native" alone.
        backend: "xla" (any device), "gpu" (NVIDIA) or "native" (CPU, C++).

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    chosen = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, weight, scale, bias, norm, residual, gated, chosen)
    implementation = resolve("linear", backend)
    if isinstance(x, RoundedRows) and (norm is not None or backend == "native"):
        raise KernelError("x", "rounded rows", "without a norm, and not with the native backend")
    if norm is not None and norm.offset and backend == "native":
        raise KernelError("norm.offset", True, "False with the native backend")
    if live is not None and (live.ndim != 2 or live.shape[1] != 2 or live.dtype != jnp.int32):
        raise KernelError("live", f"{live.dtype}{live.shape}", "int32[ranges, 2]")
    if row_invariant and backend != "native":
        raise KernelError("row_invariant", row_invariant, "True with the native backend alone")
    options = {"path": Path.ONE_ORDER} if row_invariant else {}
    return implementation.load().linear(
        x,
        weight,
        scale=scale,
        activations=activations,
        input_scale=input_scale,
        matmul=matmul,
        bias=bias,
        norm=norm,
        residual=residual,
        gated=gated,
        out_dtype=chosen,
        live=live,
        **options,
    )


def linear_in_parts(
    x: Rows,  # [M, K]
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None = None,  # float32[N]
    activations: str = "float",
    input_scale: jax.Array | None = None,  # float32[1]
    matmul: Sequence[str] = ("xla",),
    bias: jax.Array | None = None,  # [N]
    backend: str,
) -> jax.Array:  # [S, M, N]
    """`linear` in the type of x, or float32 parts of it that the caller has to add and round.

    The backend chooses S, by what fills the GPU: for a kernel that reads the result anyhow, such as
    `residual_norm` and `rotate_and_write`.

    Args:
        x, weight, scale, activations, input_scale, matmul, bias: as for `linear`.
        backend: "gpu".

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    _check(x, weight, scale, bias, None, None, False, jnp.dtype(x.dtype))
    if backend != "gpu":
        raise KernelError("backend", repr(backend), "gpu")
    # imported where it is used: the choice of parts is a GPU's
    from pallas_kernels.linear import gpu

    return gpu.in_parts(
        x,
        weight,
        scale=scale,
        activations=activations,
        input_scale=input_scale,
        matmul=matmul,
        bias=bias,
    )


def rounding_of(
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None = None,  # float32[N]
    activations: str = "float",
    input_scale: jax.Array | None = None,  # float32[1]
    matmul: Sequence[str] = ("xla",),
    dtype: DTypeLike,
    backend: str,
) -> Rounding | None:
    """What `linear` rounds rows to before it multiplies, so that a kernel before it may do that.

    Args:
        weight, scale, activations, input_scale, matmul, backend: as for `linear`.
        dtype: type of the rows.

    Returns:
        None where they are multiplied as they are, or rounded in the product itself.
    """
    if backend == "native":
        return None
    # imported where it is used: this module is below it
    from pallas_kernels.linear import xla

    return xla.rounding_of(
        weight,
        scale=scale,
        activations=activations,
        input_scale=input_scale,
        matmul=matmul,
        dtype=dtype,
    )


def _check(
    x: Rows,
    weight: Weight,
    scale: jax.Array | None,
    bias: jax.Array | None,
    norm: Norm | None,
    residual: jax.Array | None,
    gated: bool,
    out_dtype: jnp.dtype,
) -> None:
    if x.ndim != 2:
        raise KernelError("x.shape", x.shape, "[rows, inputs]")
    if x.dtype not in FLOAT_DTYPES:
        raise KernelError("x.dtype", x.dtype, "float32, float16 or bfloat16")
    if isinstance(weight, (NativeWeight, Int4Weight, Int8Weight, Fp8Weight)):
        if scale is not None:
            raise KernelError("scale", scale, "given exactly for an array of 8 bits")
        outputs = weight.scale.shape[-1] if isinstance(weight, NativeWeight) else outputs_of(weight)
    else:
        if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
            raise KernelError("weight.shape", weight.shape, f"[outputs, {x.shape[1]}]")
        if weight.dtype not in (x.dtype, *EIGHT_BITS):
            raise KernelError("weight.dtype", weight.dtype, f"that of x, {x.dtype}, int8 or uint8")
        outputs = weight.shape[0]
        if (scale is not None) != (weight.dtype in EIGHT_BITS):
            raise KernelError("scale", scale, "given exactly for an 8-bit weight")
    if scale is not None:
        check_array("scale", scale, jnp.float32, (outputs,))
    if bias is not None:
        check_array("bias", bias, x.dtype, (outputs,))
    if norm is not None:
        check_array("norm.weight", norm.weight, x.dtype, x.shape[1:])
    if gated and outputs % 2:
        raise KernelError("outputs", outputs, "an even number of outputs when gated")
    if out_dtype not in FLOAT_DTYPES:
        raise KernelError("out_dtype", out_dtype, "float32, float16 or bfloat16")
    if residual is not None:
        wanted = (x.shape[0], outputs // 2 if gated else outputs)
        check_array("residual", residual, out_dtype, wanted)

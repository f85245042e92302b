"""Linear layers on the CPU in C++ (`pallas_kernels/native`): one call for a layer and its
neighbours, weights read once, as they are stored.

Few rows are multiplied as dot products of rows, more in the CPU's matrix unit or, where it has
none, as outer products: within each, a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.linear.api import Norm, Weight
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.native.operands import optional
from pallas_kernels.native.paths import Path
from pallas_kernels.native.weights import NativeWeight, native_shape
from pallas_kernels.quantized_matmul import Rounding

WEIGHT_DTYPES = ("bfloat16", "float32", "uint8")
GROUP_MULTIPLE = 16  # inputs, where a row has several groups


def linear(
    x: jax.Array,  # [M, K]
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None,  # float32[N]
    activations: str = "float",
    input_scale: jax.Array | None = None,  # float32[1]
    matmul: Sequence[str] = (),
    bias: jax.Array | None,  # [N]
    norm: Norm | None,
    residual: jax.Array | None,  # [M, N]
    gated: bool,
    out_dtype: jnp.dtype,
    live: jax.Array | None = None,  # int32[R, 2]
    path: Path = Path.BY_ROWS,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.linear`; the result is rounded once, at the end. Only live rows are
    computed, the others are zero.

    `path`: which of the products multiplies; the call fails where the machine has not got it.

    Raises:
        KernelError: a float16 or int8 weight, or the native kernels cannot be built here.
    """
    del matmul
    if input_scale is not None:
        if not isinstance(weight, NativeWeight):
            raise KernelError("weight", type(weight).__name__, "a NativeWeight with an input_scale")
        rows = x if norm is None else rms_norm(x, norm)
        # small integers and e4m3 are exact in x's type, and the scale can wait for the sums
        values = Rounding(activations, input_scale).of(rows).values
        x, norm = values.astype(x.dtype), None
        weight, activations = weight.scaled(input_scale), "float"
    stored = weight.values if isinstance(weight, NativeWeight) else weight
    if not isinstance(stored, jax.Array):
        raise KernelError("weight", type(weight).__name__, "an array, or a NativeWeight")
    native.require()
    absent = jnp.zeros((0,), x.dtype)
    outputs = weight.scale.shape[1] if isinstance(weight, NativeWeight) else stored.shape[0]
    width = outputs // 2 if gated else outputs
    result = result_like(x, (x.shape[0], width), out_dtype)
    around = (
        absent if bias is None else bias,
        absent if residual is None else residual,
        jnp.zeros((0, 2), jnp.int32) if live is None else live,
    )
    first = absent if norm is None else norm.weight
    eps = np.float32(0.0 if norm is None else norm.eps)
    if isinstance(weight, NativeWeight):
        check_native(x, weight, activations)
        call = jax.ffi.ffi_call("jaxserve_linear_in_groups", result)
        return call(
            x,
            first,
            stored,
            weight.scale,
            optional(weight.offset),
            *around,
            eps=eps,
            gated=np.bool_(gated),
            rounded=np.bool_(activations == "int8"),
            path=np.int64(path),
        )
    if stored.dtype.name not in WEIGHT_DTYPES:
        raise KernelError("weight.dtype", stored.dtype, ", ".join(WEIGHT_DTYPES))
    call = jax.ffi.ffi_call("jaxserve_linear", result)
    return call(
        x,
        first,
        stored,
        optional(scale),
        *around,
        eps=eps,
        gated=np.bool_(gated),
        path=np.int64(path),
    )


def native_norm(x: jax.Array, norm: Norm) -> jax.Array:
    """x float32 or bfloat16 [..., K] over its root mean square, times the weight [K] in x's type.

    The numbers are those of `rms_norm` but for the order of the sum, which is that of the norms in
    front of `linear`. XLA's order may follow what stands beside it in a program.

    Raises:
        KernelError: the native kernels cannot be built here.
    """
    native.require()
    if norm.offset:
        factor = 1.0 + norm.weight.astype(jnp.float32)
        return native_norm(x.astype(jnp.float32), Norm(factor, norm.eps)).astype(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call("jaxserve_rms_norm", result_like(rows, rows.shape, x.dtype))
    return call(rows, norm.weight, eps=np.float32(norm.eps)).reshape(x.shape)


def check_native(x: jax.Array, weight: NativeWeight, activations: str) -> None:
    """Judges the shapes and types of a weight with scales by groups.

    Raises:
        KernelError: they do not fit each other or x; names the field.
    """
    inputs, (values, scale, offset) = x.shape[1], weight
    groups, outputs = scale.shape if scale.ndim == 2 else (0, 0)
    known = values.dtype.name in ("int8", "uint8", "float8_e4m3fn")
    wanted = native_shape(outputs, inputs, values.dtype == jnp.int8)
    if not known or values.shape != wanted:
        raise KernelError(
            "weight.values",
            f"{values.dtype}{values.shape}",
            f"int8, uint8 or float8_e4m3fn {list(wanted)} for {outputs} outputs",
        )
    group = inputs // max(groups, 1)
    divides = group * groups == inputs and (groups == 1 or group % GROUP_MULTIPLE == 0)
    if scale.dtype != jnp.float32 or not divides:
        raise KernelError(
            "weight.scale",
            f"{scale.dtype}{scale.shape}",
            f"float32[groups, outputs], groups of a multiple of {GROUP_MULTIPLE} inputs",
        )
    if offset is not None and offset.shape != scale.shape:
        raise KernelError("weight.offset", offset.shape, f"{scale.shape}")
    if activations not in ("float", "int8"):
        raise KernelError("activations", repr(activations), "'float' or 'int8'")
    if activations == "int8" and values.dtype == jnp.float8_e4m3fn:
        raise KernelError("activations", "'int8'", "for weights of integers")

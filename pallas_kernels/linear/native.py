"""Linear layers on the CPU in C++ (`pallas_kernels/native`): one call for a layer and its
neighbours, weights read once, as they are stored.

Up to 8 rows are multiplied as dot products of rows, more as outer products (or in the CPU's matrix
unit): within either, a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.linear.api import Norm
from pallas_kernels.native.operands import optional

WEIGHT_DTYPES = ("bfloat16", "float32", "uint8")


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
    live: jax.Array | None = None,  # int32[R, 2]
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.linear`; the result is rounded once, at the end. Only live rows are
    computed, the others are zero.

    Raises:
        KernelError: a float16 or int8 weight, or the native kernels cannot be built here.
    """
    if weight.dtype.name not in WEIGHT_DTYPES:
        raise KernelError("weight.dtype", weight.dtype, ", ".join(WEIGHT_DTYPES))
    native.require()
    absent = jnp.zeros((0,), x.dtype)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    call = jax.ffi.ffi_call("jaxserve_linear", result_like(x, (x.shape[0], width), out_dtype))
    return call(
        x,
        absent if norm is None else norm.weight,
        weight,
        optional(scale),
        absent if bias is None else bias,
        absent if residual is None else residual,
        jnp.zeros((0, 2), jnp.int32) if live is None else live,
        eps=np.float32(0.0 if norm is None else norm.eps),
        gated=np.bool_(gated),
    )

"""Linear layers on the CPU in C++ (`pallas_kernels/native`): one call for a layer and its
neighbours, weights read once, as they are stored.

A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.linear import xla
from pallas_kernels.linear.api import Norm
from pallas_kernels.native.operands import optional

WEIGHT_DTYPES = ("bfloat16", "float32", "int8")


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
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.linear`; the result is rounded once, at the end.

    Above `native.linear_rows()` rows the work goes to XLA, whose matrix product is faster there.

    Raises:
        KernelError: a float16 weight, or the native kernels cannot be built on this machine.
    """
    if weight.dtype.name not in WEIGHT_DTYPES:
        raise KernelError("weight.dtype", weight.dtype, ", ".join(WEIGHT_DTYPES))
    native.require()
    limit = native.linear_rows()
    if limit is not None and x.shape[0] > limit:
        return xla.linear(
            x,
            weight,
            scale=scale,
            bias=bias,
            norm=norm,
            residual=residual,
            gated=gated,
            out_dtype=out_dtype,
        )
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
        eps=np.float32(0.0 if norm is None else norm.eps),
        gated=np.bool_(gated),
    )

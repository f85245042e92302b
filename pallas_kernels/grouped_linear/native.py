"""Grouped linear layers on the CPU in C++ (`pallas_kernels/native`): the linear layers' own code,
called for each group that has rows; the other weights are not read. A group's weight of few bits
is copied for its call.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear.xla import in_blocks
from pallas_kernels.linear import native as linear_native
from pallas_kernels.linear.api import Weight
from pallas_kernels.linear.native import WEIGHT_DTYPES
from pallas_kernels.native.operands import optional
from pallas_kernels.native.paths import Path
from pallas_kernels.native.weights import NativeWeight


def grouped_linear(
    x: jax.Array,  # [M, K]
    weight: Weight,  # [E, N, K]
    sizes: jax.Array,  # int32[E]
    *,
    scale: jax.Array | None,  # float32[E, N]
    activations: str,
    gated: bool,
    out_dtype: jnp.dtype,
    path: Path = Path.BY_ROWS,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`; the result is rounded once, at the end.

    Raises:
        KernelError: a float16 or int8 weight, or the native kernels cannot be built here.
    """
    if isinstance(weight, NativeWeight):
        return in_blocks(
            x,
            weight,
            sizes,
            scale,
            activations=activations,
            gated=gated,
            out_dtype=out_dtype,
            is_counted=True,
            product=partial(linear_native.linear, path=path),
        )
    if not isinstance(weight, jax.Array):
        raise KernelError("weight", type(weight).__name__, "an array, or a NativeWeight")
    if weight.dtype.name not in WEIGHT_DTYPES:
        raise KernelError("weight.dtype", weight.dtype, ", ".join(WEIGHT_DTYPES))
    native.require()
    width = weight.shape[1] // 2 if gated else weight.shape[1]
    result = result_like(x, (x.shape[0], width), out_dtype)
    call = jax.ffi.ffi_call("jaxserve_grouped_linear", result)
    return call(x, weight, optional(scale), sizes, gated=np.bool_(gated), path=np.int64(path))

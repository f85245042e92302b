"""Grouped linear layers on the CPU in C++ (`pallas_kernels/native`): the linear layers' own code,
called for each group that has rows; the other weights are not read. A group's weight of few bits
is copied for its call.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from pallas_kernels import native
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear.layer import Layer
from pallas_kernels.grouped_linear.xla import in_blocks
from pallas_kernels.linear import native as linear_native
from pallas_kernels.linear.native import WEIGHT_DTYPES
from pallas_kernels.native.operands import optional
from pallas_kernels.native.paths import Path
from pallas_kernels.native.weights import NativeWeight


def grouped_linear(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
    *,
    path: Path = Path.BY_ROWS,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`; the result is rounded once, at the end.

    Raises:
        KernelError: a float16 or int8 weight, or the native kernels cannot be built here.
    """
    weight = layer.weight
    if isinstance(weight, NativeWeight):
        product = partial(linear_native.linear, path=path)
        return in_blocks(x, sizes, layer, is_counted=True, product=product)
    if not isinstance(weight, jax.Array):
        raise KernelError("weight", type(weight).__name__, "an array, or a NativeWeight")
    if weight.dtype.name not in WEIGHT_DTYPES:
        raise KernelError("weight.dtype", weight.dtype, ", ".join(WEIGHT_DTYPES))
    native.require()
    result = result_like(x, (x.shape[0], layer.width), layer.out_dtype)
    call = jax.ffi.ffi_call("jaxserve_grouped_linear", result)
    options = {"gated": np.bool_(layer.gated), "path": np.int64(path)}
    return call(x, weight, optional(layer.scale), sizes, **options)

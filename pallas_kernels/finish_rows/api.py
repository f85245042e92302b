"""finish_rows: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.pages import FLOAT_DTYPES
from pallas_kernels.quantized_matmul import Rounding, Rows


def finish_rows(
    product: jax.Array,  # [S, M, N]
    *,
    dtype: DTypeLike,
    gated: bool = False,
    rounding: Rounding | None = None,
    backend: str,
    interpret: Any = None,
) -> Rows:  # [M, N], or [M, N / 2] when gated
    """The sum of S parts of a product, gated and rounded as the next product takes its rows.

    The parts are added in float32 and rounded to `dtype`; so are silu(gate) and that times up.

    Args:
        product: in `dtype`, or float32 parts of it.
        dtype: float32, float16 or bfloat16.
        gated: columns 2 i and 2 i + 1 are gate and up of the inner dimension i, and the result is
            silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020).
        rounding: to 8 bits, at the end; None leaves rows in `dtype`.
        backend: "triton" (NVIDIA GPUs) or "xla" (any device).
        interpret: True runs the kernel in Pallas' interpreter; None compiles it.

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    chosen = jnp.dtype(dtype)
    if chosen not in FLOAT_DTYPES:
        raise KernelError("dtype", chosen, "float32, float16 or bfloat16")
    if product.ndim != 3 or not product.shape[0]:
        raise KernelError("product.shape", product.shape, "[parts, rows, columns]")
    if product.dtype not in (chosen, jnp.float32):
        raise KernelError("product.dtype", product.dtype, f"float32 or {chosen}")
    if gated and product.shape[2] % 2:
        raise KernelError("product.shape", product.shape, "an even number of columns when gated")
    implementation = resolve("finish_rows", backend)
    options = implementation.options(interpret=interpret)
    rows: Rows = implementation.load().finish_rows(
        product, dtype=chosen, gated=gated, rounding=rounding, **options
    )
    return rows

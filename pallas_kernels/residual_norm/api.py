"""residual_norm: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import resolve
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.linear.api import Norm
from pallas_kernels.pages import FLOAT_DTYPES
from pallas_kernels.quantized_matmul import Rounding, Rows


def residual_norm(
    residual: jax.Array,  # [T, E]
    product: jax.Array,  # [S, T, E]
    norm: Norm,
    *,
    behind: Norm | None = None,
    rounding: Rounding | None = None,
    backend: str,
    interpret: Any = None,
) -> tuple[Rows, jax.Array]:  # [T, E], [T, E]
    """The sum of S parts of a product, added to the residual stream, and its RMS norm.

    The parts are added in float32 and rounded to the type of the stream; so are the sum with the
    stream and what norms give.

    Args:
        residual: the stream: float32, float16 or bfloat16.
        product: in the type of the stream, or float32 parts of it.
        norm: of the sum; its weight is of the type of the stream.
        behind: a norm of the product before it is added, likewise (Gemma 2); None: there is none.
        rounding: of the norm to 8 bits, for the product that reads it; None leaves it in the type
            of the stream.
        backend: "triton" (NVIDIA GPUs) or "xla" (any device).
        interpret: True runs the kernel in Pallas' interpreter; None compiles it.

    Returns:
        The norm of the sum, and the sum: the stream from here on.

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    if residual.ndim != 2 or residual.dtype not in FLOAT_DTYPES:
        raise KernelError(
            "residual",
            f"{residual.dtype}{residual.shape}",
            "[rows, columns] of float32, float16 or bfloat16",
        )
    if product.ndim != 3 or product.shape[1:] != residual.shape or not product.shape[0]:
        raise KernelError("product.shape", product.shape, f"[parts, {residual.shape}]")
    if product.dtype not in (residual.dtype, jnp.float32):
        raise KernelError("product.dtype", product.dtype, f"float32 or {residual.dtype}")
    for name, one in (("norm", norm), ("behind", behind)):
        if one is not None:
            check_array(f"{name}.weight", one.weight, residual.dtype, residual.shape[1:])
    chosen = resolve("residual_norm", backend)
    options = chosen.options(interpret=interpret)
    normed, stream = chosen.load().residual_norm(
        residual, product, norm, behind=behind, rounding=rounding, **options
    )
    return normed, stream

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

GATES = ("silu", "gelu_tanh")


def finish_rows(
    product: jax.Array,  # [S, M, N]
    *,
    dtype: DTypeLike,
    gate: str | None = None,
    rounding: Rounding | None = None,
    backend: str,
    interpret: Any = None,
) -> Rows:  # [M, N], or [M, N / 2] with a gate
    """The sum of S parts of a product, gated and rounded as the next product takes its rows.

    The parts are added in float32 and rounded to `dtype`; so are activation(gate) and that times up
    (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        product: in `dtype`, or float32 parts of it.
        dtype: float32, float16 or bfloat16.
        gate: the activation where columns 2 i and 2 i + 1 are gate and up of the inner dimension
            i: "silu" or "gelu_tanh" (GELU by tanh: Hendrycks and Gimpel 2016); None: no gate.
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
    if gate not in (None, *GATES):
        raise KernelError("gate", gate, f"{', '.join(GATES)} or None")
    if gate and product.shape[2] % 2:
        raise KernelError("product.shape", product.shape, "an even number of columns with a gate")
    implementation = resolve("finish_rows", backend)
    options = implementation.options(interpret=interpret)
    rows: Rows = implementation.load().finish_rows(
        product, dtype=chosen, gate=gate, rounding=rounding, **options
    )
    return rows

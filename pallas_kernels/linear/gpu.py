"""Linear layers on an NVIDIA GPU: XLA's products, told what becomes of their results.

A product rounds its float32 sums itself: where XLA is asked for float32 and a conversion follows, a
product that its autotuning gives to cuBLAS may write float32 for another kernel to read and round.
Products of few rows have too few tiles for the chip, so K is divided (`in_parts`). XLA would do
that too, and would then need a kernel of its own to add the parts before anything that is not XLA's
reads them; here the kernel that reads the result adds them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear import xla
from pallas_kernels.linear.api import Weight
from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.quantized_matmul import RoundedRows, Rows
from pallas_kernels.quantized_matmul.splits import Tiling, number_of_splits

__all__ = ["in_parts", "linear"]

# of the tiles that XLA's own choice of parts assumes
TILE_ROWS, TILE_CHANNELS = 64, 128
STEP_INPUTS = 64

linear = functools.partial(xla.linear, rounds=True)


def number_of_parts(rows: int, outputs: int, inputs: int, element: int) -> int:
    """Parts of K for a product of 16-bit operands on the GPU that is traced for; see `splits`."""
    if inputs % STEP_INPUTS:
        return 1
    tiling = Tiling.of(
        (rows, outputs, inputs),
        (min(rows, TILE_ROWS), TILE_CHANNELS, STEP_INPUTS),
        TILE_CHANNELS * STEP_INPUTS * element,
        element,
    )
    return number_of_splits(tiling, multiprocessors(), equal=True)


def in_parts(
    x: Rows,  # [M, K]
    weight: Weight,  # [N, K]
    *,
    scale: jax.Array | None,  # float32[N]
    activations: str = "float",
    input_scale: jax.Array | None = None,  # float32[1]
    matmul: Sequence[str] = ("xla",),
    bias: jax.Array | None,  # [N]
) -> jax.Array:  # [S, M, N]
    """As `pallas_kernels.linear.linear_in_parts`; one part where a bias follows."""
    options: dict[str, Any] = {
        "scale": scale,
        "activations": activations,
        "input_scale": input_scale,
        "matmul": matmul,
        "out_dtype": x.dtype,
    }
    if bias is not None:
        around: dict[str, Any] = {"norm": None, "residual": None, "gated": False}
        return linear(x, weight, bias=bias, **around, **options)[None]
    if not isinstance(weight, jax.Array) or scale is not None or isinstance(x, RoundedRows):
        return xla.quantized_product(x, weight, in_parts=True, **options)
    rows, (outputs, inputs) = x.shape[0], weight.shape
    parts = number_of_parts(rows, outputs, inputs, x.dtype.itemsize)
    if parts == 1:
        return xla.dot(x, weight, x.dtype)[None]
    divided, weights = (matrix.reshape(matrix.shape[0], parts, -1) for matrix in (x, weight))
    return xla.dot(divided, weights, jnp.float32)

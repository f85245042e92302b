"""quantized_matmul: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import resolve
from pallas_kernels.backends.record import Tuning
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.quantized_matmul import coverage
from pallas_kernels.quantized_matmul.activations import (
    RoundedRows,
    Rounding,
    Rows,
    rounded_rows,
)
from pallas_kernels.quantized_matmul.formats import (
    Fp8Weight,
    Int8Weight,
    QuantizedWeight,
    check_weight,
)

FLOAT_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "float16", "bfloat16"))


def _check(x: Rows, weight: QuantizedWeight, activations: str, out_dtype: jnp.dtype) -> None:
    if x.ndim != 2 or x.shape[0] < 1:
        raise KernelError("x.shape", x.shape, "[rows, inputs] with at least one row")
    if x.dtype not in FLOAT_DTYPES:
        raise KernelError("x.dtype", x.dtype, "float32, float16 or bfloat16")
    check_weight(weight, x.shape[1])
    if out_dtype not in FLOAT_DTYPES:
        raise KernelError("out_dtype", out_dtype, "float32, float16 or bfloat16")
    if activations not in ("float", "int8", "fp8"):
        raise KernelError("activations", repr(activations), "'float', 'int8' or 'fp8'")
    needed = {"int8": Int8Weight, "fp8": Fp8Weight}.get(activations)
    if needed is not None and not isinstance(weight, needed):
        raise KernelError(
            "activations", repr(activations), f"for {needed.__name__} only, not for "
            f"{type(weight).__name__}",
        )  # fmt: skip
    if isinstance(x, RoundedRows) and Rounding(activations).dtype != x.values.dtype:
        raise KernelError(
            "activations", repr(activations), f"what x is rounded to, {x.values.dtype}"
        )


def _check_input_scale(scale: jax.Array, activations: str) -> None:
    if activations == "float":
        raise KernelError("input_scale", "given", "for activations that are rounded")
    check_array("input_scale", scale, jnp.float32, (1,))


def _check_tuning(tuning: Tuning) -> None:
    for name, value in dataclasses.asdict(tuning).items():
        if value is not None and value < 1:
            raise KernelError(f"tuning.{name}", value, "at least 1")


def quantized_matmul(
    x: Rows,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    activations: str = "float",
    out_dtype: DTypeLike | None = None,
    input_scale: jax.Array | None = None,  # float32[1]
    in_parts: bool = False,
    tuning: Tuning | None = None,
    backend: str,
    interpret: Any = None,
) -> jax.Array:  # [M, N], or [S, M, N] in parts
    """x @ weight.T for a weight that stays quantised in memory.

    Sums are float32, or int32 for activations="int8". A bias is added outside. Every backend gives
    S parts of the product: one of `out_dtype`, or more in float32 where it divides K, each with all
    scales, to be added up.

    Args:
        x: activations: float32, float16 or bfloat16; or such rows rounded to what `activations`
            says.
        weight: Int8Weight, Int4Weight or Fp8Weight, [outputs, inputs].
        activations: "float" multiplies x as it is with the dequantised weight; "int8" rounds every
            row of x to 8-bit integers with a scale of its own and multiplies integers (for
            Int8Weight); "fp8" does so with float8_e4m3fn (for Fp8Weight).
        out_dtype: type of the result; that of x by default.
        input_scale: what rounded activations are multiplied with, in place of a scale of each row;
            those that are too large for it are cut off. Not read where x is rounded.
        in_parts: leave the parts to be added by what reads them.
        tuning: sizes of a kernel's tiles, of the backend's own type; None lets the
            kernel choose from the shapes.
        backend: "xla" (any device), "mosaic_gpu" (NVIDIA Hopper), "triton" (other NVIDIA GPUs),
            "mosaic_tpu" or "reference".
        interpret: None compiles; otherwise the parameters of the backend's interpreter, for
            "mosaic_gpu", "triton" and "mosaic_tpu".

    Returns:
        The product, or parts of it.

    Raises:
        KernelError: a shape, a type, an option or the backend is not supported; names it.
    """
    chosen = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(x, weight, activations, chosen)
    if input_scale is not None:
        _check_input_scale(input_scale, activations)
    implementation = resolve("matmul", backend)
    of_kernel = implementation.options(tuning=tuning, interpret=interpret)
    if implementation.interprets:
        shape = coverage.MatmulShape.of(x, weight, activations)
        coverage.require(implementation.covers(shape), backend, shape)
        if tuning is not None:
            _check_tuning(tuning)
    rows = rounded_rows(x, activations, input_scale)
    parts = implementation.load().matmul(rows, weight, out_dtype=chosen, **of_kernel)
    if in_parts:
        return parts
    return parts[0] if len(parts) == 1 else parts.sum(axis=0).astype(chosen)

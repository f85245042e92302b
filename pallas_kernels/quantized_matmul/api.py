"""quantized_matmul: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import resolve
from pallas_kernels.backends.record import Implementation, Tuning
from pallas_kernels.errors import KernelError, check_array
from pallas_kernels.pages import FLOAT_DTYPES
from pallas_kernels.quantized_matmul.activations import RoundedRows, Rounding, Rows, rounded_rows
from pallas_kernels.quantized_matmul.coverage import MatmulShape
from pallas_kernels.quantized_matmul.formats import (
    Fp8Weight,
    Int8Weight,
    QuantizedWeight,
    check_weight,
)
from pallas_kernels.quantized_matmul.operands import Operands

ROUNDED = {"int8": Int8Weight, "fp8": Fp8Weight}  # activations, and the weights they are for


def check_operands(
    x: Rows, weight: QuantizedWeight, activations: str, out_dtype: jnp.dtype
) -> None:
    """Judges what a product multiplies, for every backend.

    Raises:
        KernelError: a shape, a type or the activations do not fit; names the field.
    """
    if x.ndim != 2 or x.shape[0] < 1:
        raise KernelError("x.shape", x.shape, "[rows, inputs] with at least one row")
    for name, dtype in (("x.dtype", x.dtype), ("out_dtype", out_dtype)):
        if dtype not in FLOAT_DTYPES:
            raise KernelError(name, dtype, "float32, float16 or bfloat16")
    check_weight(weight, x.shape[1])
    chosen = repr(activations)
    if activations not in ("float", *ROUNDED):
        raise KernelError("activations", chosen, "'float', 'int8' or 'fp8'")
    needed, given = ROUNDED.get(activations), type(weight)
    if needed is not None and given is not needed:
        allowed = f"for {needed.__name__} only, not for {given.__name__}"
        raise KernelError("activations", chosen, allowed)
    if isinstance(x, RoundedRows) and Rounding(activations).dtype != x.values.dtype:
        raise KernelError("activations", chosen, f"what x is rounded to, {x.values.dtype}")


def _check_kernel(
    implementation: Implementation, shape: MatmulShape, tuning: Tuning | None
) -> None:
    refusal = implementation.covers(shape)
    if refusal is not None:
        allowed = (
            f"the {implementation.backend} backend takes {refusal.allowed}; the weight is "
            f"{shape.stored}[{shape.outputs}, {shape.inputs}], x is {shape.dtype}"
        )
        raise KernelError(refusal.field, refusal.value, allowed)
    for name, value in dataclasses.asdict(tuning).items() if tuning else ():
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
    check_operands(x, weight, activations, chosen)
    if input_scale is not None:
        if activations == "float":
            raise KernelError("input_scale", "given", "for activations that are rounded")
        check_array("input_scale", input_scale, jnp.float32, (1,))
    implementation = resolve("matmul", backend)
    options = {"out_dtype": chosen, **implementation.options(tuning=tuning, interpret=interpret)}
    if implementation.interprets:
        _check_kernel(implementation, MatmulShape.of(x, weight, activations), tuning)
    operands = Operands.of(rounded_rows(x, activations, input_scale), weight)
    parts = _parts(implementation.load().matmul, operands, tuple(options.items()))
    if in_parts:
        return parts
    return parts[0] if len(parts) == 1 else parts.sum(axis=0).astype(chosen)


@functools.partial(jax.jit, static_argnames=("matmul", "options"))
def _parts(matmul: Callable[..., jax.Array], operands: Operands, options: Any) -> jax.Array:
    """What every backend gives, [S, M, N]: one part of `out_dtype`, or more of float32."""
    return matmul(operands, **dict(options))

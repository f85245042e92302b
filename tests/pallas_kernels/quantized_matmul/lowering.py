"""Shapes without arrays, and lowering for a GPU that is not there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    formats,
    quantized_matmul,
)
from tests.pallas_kernels.lowering import lowered_for_cuda
from tests.pallas_kernels.quantized_matmul.oracle import SCALE_TYPES


def abstract_weight(outputs: int, inputs: int, kind: str) -> QuantizedWeight:
    """A weight of ShapeDtypeStructs; kinds as in oracle.random_weight."""
    shape = jax.ShapeDtypeStruct
    name, *options = kind.split()
    if name == "int4":
        groups = 1 if options[0] == "row" else inputs // int(options[0])
        scale_type = next((one for one in options if one in SCALE_TYPES), "float32")
        return Int4Weight(
            shape((outputs, formats.packed_columns(inputs)), jnp.uint16),
            shape((groups, outputs), scale_type),
            shape((groups, outputs), jnp.uint8) if "zeros" in options else None,
        )
    if name == "int8":
        return Int8Weight(shape((outputs, inputs), jnp.int8), shape((outputs,), jnp.float32))
    by_group = {"128": (inputs // 128, outputs), "tensor": ()}
    scale = shape(by_group[options[0]] if options else (outputs,), jnp.float32)
    return Fp8Weight(shape((outputs, inputs), formats.FP8), scale)


def lowered_text(
    backend: str, rows: int, outputs: int, inputs: int, kind: str, dtype: str, activations: str
) -> str:
    """The text of quantized_matmul lowered for an H200."""
    function = functools.partial(quantized_matmul, activations=activations, backend=backend)
    x = jax.ShapeDtypeStruct((rows, inputs), dtype)
    return lowered_for_cuda(function, x, abstract_weight(outputs, inputs, kind)).as_text()

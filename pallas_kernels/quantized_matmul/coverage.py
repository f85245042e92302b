"""What each quantized_matmul backend covers, judged without importing its compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.formats import (
    BLOCK,
    GROUPS,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    group_of,
    outputs_of,
)


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """The static facts by which a backend takes or refuses a product.

    Attributes:
        outputs: output channels N.
        inputs: inputs K.
        stored: "int8", "int4" or "fp8".
        group: inputs that share a scale, for int4; else None.
        dtype: type of x.
        activations: "float", "int8" or "fp8".
    """

    outputs: int
    inputs: int
    stored: str
    group: int | None
    dtype: np.dtype
    activations: str

    @staticmethod
    def of(x: jax.Array, weight: QuantizedWeight, activations: str) -> MatmulShape:
        """The facts of x [M, K] and a weight [N, K]."""
        inputs = x.shape[1]
        is_int4 = isinstance(weight, Int4Weight)
        eight_bits = "int8" if isinstance(weight, Int8Weight) else "fp8"
        return MatmulShape(
            outputs=outputs_of(weight),
            inputs=inputs,
            stored="int4" if is_int4 else eight_bits,
            group=group_of(weight, inputs) if isinstance(weight, Int4Weight) else None,
            dtype=jnp.dtype(x.dtype),
            activations=activations,
        )

    @property
    def block(self) -> int:
        """Inputs in 128 stored bytes of a row."""
        return BLOCK if self.stored == "int4" else 128


def mosaic_gpu(shape: MatmulShape) -> KernelError | None:
    """Why the Mosaic GPU kernel does not cover a product; None when it does."""
    if shape.dtype not in (jnp.bfloat16, jnp.float16):
        return KernelError("x.dtype", shape.dtype, "bfloat16 or float16")
    if shape.stored == "int4" and (shape.inputs % GROUPS[0] or shape.inputs < BLOCK):
        return KernelError(
            "inputs", shape.inputs, f"a multiple of {GROUPS[0]}, at least {BLOCK}, for int4"
        )
    if shape.stored != "int4" and shape.inputs % shape.block:
        return KernelError(
            "inputs", shape.inputs, f"a multiple of {shape.block} for {shape.stored}"
        )
    if shape.outputs % 16 or shape.outputs < 128:
        return KernelError("outputs", shape.outputs, "a multiple of 16, at least 128")
    return None


def triton(shape: MatmulShape) -> KernelError | None:
    """Why the Triton kernel does not cover a product; None when it does."""
    if shape.activations == "fp8":
        return KernelError("activations", "'fp8'", "'float' or 'int8'")
    return None


def mosaic_tpu(shape: MatmulShape) -> KernelError | None:
    """Why the Mosaic TPU kernel does not cover a product; None when it does."""
    if shape.activations == "fp8":
        return KernelError("activations", "'fp8'", "'float' or 'int8'")
    if shape.dtype not in (jnp.bfloat16, jnp.float32):
        return KernelError("x.dtype", shape.dtype, "bfloat16 or float32")
    if shape.inputs % shape.block:
        return KernelError(
            "inputs", shape.inputs, f"a multiple of {shape.block} for {shape.stored}"
        )
    if shape.outputs % 128:
        return KernelError("outputs", shape.outputs, "a multiple of 128")
    return None


# backends whose coverage is limited; "xla" and "reference" take every product
MATMUL: dict[str, Callable[[MatmulShape], KernelError | None]] = {
    "mosaic_gpu": mosaic_gpu,
    "triton": triton,
    "mosaic_tpu": mosaic_tpu,
}


def require(refusal: KernelError | None, backend: str, shape: MatmulShape) -> None:
    """Raises a refusal with the shape that was refused.

    Raises:
        KernelError: `refusal` is one.
    """
    if refusal is not None:
        raise KernelError(
            refusal.field,
            refusal.value,
            f"the {backend} backend takes {refusal.allowed}; the weight is "
            f"{shape.stored}[{shape.outputs}, {shape.inputs}], x is {shape.dtype}",
        )

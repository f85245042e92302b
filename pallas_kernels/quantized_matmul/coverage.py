"""The facts by which backends take or refuse a product, and how a refusal is told."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.activations import Rows
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
        group: inputs that share a scale, where an output may have several; else None.
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
    def of(
        x: Rows | jax.ShapeDtypeStruct, weight: QuantizedWeight, activations: str
    ) -> MatmulShape:
        """The facts of x [M, K] and a weight [N, K]."""
        inputs = x.shape[1]
        is_int4 = isinstance(weight, Int4Weight)
        eight_bits = "int8" if isinstance(weight, Int8Weight) else "fp8"
        return MatmulShape(
            outputs=outputs_of(weight),
            inputs=inputs,
            stored="int4" if is_int4 else eight_bits,
            group=group_of(weight, inputs) if weight[1].ndim == 2 else None,
            dtype=jnp.dtype(x.dtype),
            activations=activations,
        )

    @property
    def block(self) -> int:
        """Inputs in 128 stored bytes of a row."""
        return BLOCK if self.stored == "int4" else 128

    @property
    def least_group(self) -> int:
        """Inputs of the smallest group of 4-bit weights."""
        return GROUPS[0]


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

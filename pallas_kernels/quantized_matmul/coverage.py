"""The facts by which backends take or refuse a product."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul.activations import Rows
from pallas_kernels.quantized_matmul.formats import (
    BLOCK,
    GROUPS,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
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
        inputs, scale = x.shape[1], weight[1]
        return MatmulShape(
            outputs=outputs_of(weight),
            inputs=inputs,
            stored={Int4Weight: "int4", Int8Weight: "int8"}.get(type(weight), "fp8"),
            group=inputs // len(scale) if scale.ndim == 2 else None,
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

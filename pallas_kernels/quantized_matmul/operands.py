"""What the kernels of a product multiply, in the one form that all of them take."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.activations import Rows, split_rows
from pallas_kernels.quantized_matmul.formats import (
    QuantizedWeight,
    dequantized,
    group_of,
    group_scales,
)


class Operands(NamedTuple):
    """Rows and a weight, or E weights of groups of rows; in a kernel the references to them.

    Attributes:
        rows: [M, K], of 8 bits where they are rounded.
        row_scale: float32[M or more] of rounded rows; else None.
        stored: [N, K] or uint16[N, K / 4]; [E, N, ...].
        scales: float32[groups, N], [E, groups, N], of 4-bit elements also of 16 bits; None where
            elements are in the type of the rows.
        zeros: uint8 zero points of the shape of the scales; None: 8 of 4 bits, 0 of others.
    """

    rows: Any
    row_scale: Any
    stored: Any
    scales: Any
    zeros: Any

    @staticmethod
    def of(x: Rows, weight: QuantizedWeight) -> Operands:
        """The operands of x [M, K] and a weight [N, K]."""
        return Operands(*split_rows(x), weight[0], *group_scales(weight))

    def in_groups(self) -> Operands:
        """A weight as the only one of groups of rows."""
        zeros = None if self.zeros is None else self.zeros[None]
        return self._replace(stored=self.stored[None], scales=self.scales[None], zeros=zeros)

    def matrix(self) -> jax.Array:
        """The matrix float32[N, K] that a weight stands for."""
        return dequantized(self.stored, self.scales, self.zeros, self.rows.shape[1])

    @property
    def column(self) -> jax.Array:
        """The scales of rounded rows, float32[M, 1]."""
        scales: jax.Array = self.row_scale[: self.rows.shape[0], None]
        return scales

    @property
    def is_int4(self) -> bool:
        """Whether elements are packed."""
        return bool(self.stored.dtype == jnp.uint16)

    @property
    def outputs(self) -> int:
        """Output channels N of a matrix."""
        return int(self.stored.shape[-2])

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None where one scale serves a row."""
        groups = 1 if self.scales is None else self.scales.shape[-2]
        words = self.stored.shape[-1] if self.is_int4 else None
        return group_of(self.rows.shape[1], groups, words) if groups > 1 else None

    @property
    def sum_type(self) -> Any:
        """The type of sums of products."""
        return jnp.int32 if self.rows.dtype == jnp.int8 else jnp.float32


def product(x: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
    """x [M, K] @ weights [N, K].T with sums of a type; float32 at full precision."""
    return lax.dot_general(
        x,
        weights,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )

"""Layers of groups of rows: the arrays of a linear layer's, with an axis of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError
from pallas_kernels.linear.api import Weight, as_stored_weight
from pallas_kernels.native.weights import NativeWeight
from pallas_kernels.quantized_matmul.activations import Rows, rounded_rows, split_rows
from pallas_kernels.quantized_matmul.formats import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    group_of,
    packed_columns,
)
from pallas_kernels.quantized_matmul.operands import Operands


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "scale"),
    meta_fields=("activations", "gated", "out_dtype"),
)
@dataclass(frozen=True, slots=True)
class Layer:
    """A matrix a group, and what becomes of the products.

    Attributes:
        weight, scale, activations, gated, out_dtype: as `pallas_kernels.grouped_linear` takes them.
    """

    weight: Weight
    scale: jax.Array | None
    activations: str
    gated: bool
    out_dtype: jnp.dtype

    @property
    def width(self) -> int:
        """Columns of the result."""
        outputs = sizes_of(self.weight)[1]
        return outputs // 2 if self.gated else outputs

    def product(
        self, linear: Callable[..., jax.Array], rows: jax.Array, group: jax.Array, **options: Any
    ) -> jax.Array:
        """Rows times the matrix of one group, by a backend's linear layer."""
        weight = of_group(self.weight, group)
        if isinstance(weight, Int4Weight):
            weight = _without_fill(weight, rows.shape[1])
        return linear(
            rows,
            weight,
            scale=None if self.scale is None else self.scale[group],
            activations=self.activations,
            bias=None,
            norm=None,
            residual=None,
            gated=self.gated,
            out_dtype=self.out_dtype,
            **options,
        )

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded to 8-bit integers before they are multiplied."""
        return self.scale is not None or self.activations == "int8"

    def operands(self, x: Rows, *, rounds: bool = True) -> Operands:
        """What a kernel takes for rows x; "fp8" is taken for "float".

        Args:
            x: rows, rounded already or not.
            rounds: whether to round them here where `self.rounds`.

        Raises:
            KernelError: the weight is one for native kernels.
        """
        weight, stored = self.weight, elements_of(self.weight)
        scales, zeros = self.scale, None
        if isinstance(weight, NativeWeight):
            raise KernelError("weight", "NativeWeight", "a weight of quantized_matmul, or an array")
        if isinstance(weight, Int4Weight):
            scales, zeros = weight.scales, weight.zeros
        elif isinstance(weight, (Int8Weight, Fp8Weight)):
            scales = weight.scale
        elif self.scale is not None:
            stored = as_stored_weight(stored, jnp.int8)
        if scales is not None and scales.ndim == 2:
            scales = scales[:, None]
        rows = rounded_rows(x, "int8" if self.rounds and rounds else "float", None)
        return Operands(*split_rows(rows), stored, scales, zeros)


def of_group(weight: Weight, group: jax.Array) -> Weight:
    """The weight of one group.

    Args:
        weight: elements [E, ...]; scales [E, N] of one an output, else [E, inputs' groups, N], of a
            `NativeWeight` [inputs' groups, E, N].
        group: int32[].
    """
    if isinstance(weight, Int4Weight):
        zeros = None if weight.zeros is None else weight.zeros[group]
        return Int4Weight(weight.packed[group], weight.scales[group], zeros)
    if isinstance(weight, NativeWeight):
        offset = None if weight.offset is None else weight.offset[:, group]
        return NativeWeight(weight.values[group], weight.scale[:, group], offset)
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[group], weight.scale[group])
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.values[group], weight.scale[group])
    return weight[group]


def _without_fill(weight: Int4Weight, inputs: int) -> Int4Weight:
    """A weight [N, K] whose rows end with their inputs."""
    (packed, scales, zeros), columns = weight, packed_columns(inputs)
    if packed.shape[1] == columns:
        return weight
    groups = len(scales)
    if groups > 1:
        groups = inputs // group_of(inputs, groups, packed.shape[1])
    kept = None if zeros is None else zeros[:groups]
    return Int4Weight(packed[:, :columns], scales[:groups], kept)


def elements_of(weight: Weight) -> jax.Array:
    """The elements as they are stored, [E, ...]."""
    stored: jax.Array = weight[0] if isinstance(weight, tuple) else weight
    return stored


def sizes_of(weight: Weight) -> tuple[int, int]:
    """Groups, and outputs of each."""
    if isinstance(weight, NativeWeight):
        groups, outputs = weight.scale.shape[1:]
        return groups, outputs
    stored = elements_of(weight)
    return stored.shape[0], stored.shape[1]

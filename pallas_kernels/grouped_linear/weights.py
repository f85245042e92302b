"""Weights of groups of rows: the arrays of a linear layer's, with an axis of groups."""

from __future__ import annotations

import jax

from pallas_kernels.linear.api import Weight
from pallas_kernels.native.weights import NativeWeight
from pallas_kernels.quantized_matmul.formats import Fp8Weight, Int4Weight, Int8Weight


def of_group(weight: Weight, group: jax.Array) -> Weight:
    """The weight of one group.

    Args:
        weight: elements [E, ...]; scales [E, N] of one an output, else [inputs' groups, E, N].
        group: int32[].
    """
    if isinstance(weight, Int4Weight):
        zeros = None if weight.zeros is None else weight.zeros[:, group]
        return Int4Weight(weight.packed[group], weight.scales[:, group], zeros)
    if isinstance(weight, NativeWeight):
        offset = None if weight.offset is None else weight.offset[:, group]
        return NativeWeight(weight.values[group], weight.scale[:, group], offset)
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[group], weight.scale[group])
    if isinstance(weight, Fp8Weight):
        by_input = weight.scale.ndim == 3
        scale = weight.scale[:, group] if by_input else weight.scale[group]
        return Fp8Weight(weight.values[group], scale)
    return weight[group]


def elements_of(weight: Weight) -> jax.Array:
    """The elements as they are stored, [E, ...]."""
    stored: jax.Array = weight if isinstance(weight, jax.Array) else weight[0]
    return stored


def sizes_of(weight: Weight) -> tuple[int, int]:
    """Groups, and outputs of each."""
    if isinstance(weight, Int4Weight):
        scales = weight.scales.shape[1:]
    elif isinstance(weight, NativeWeight):
        scales = weight.scale.shape[1:]
    elif isinstance(weight, (Int8Weight, Fp8Weight)):
        scales = weight.scale.shape[-2:]
    else:
        scales = weight.shape[:2]
    groups, outputs = scales
    return groups, outputs

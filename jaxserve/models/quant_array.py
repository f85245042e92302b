"""QuantArray: a weight of few bits with its scales, as one parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.quantized import ELEMENTS, INT4_ZERO, Encoding
from jaxserve.errors import ValidationError
from pallas_kernels.linear import NativeWeight
from pallas_kernels.native.weights import (
    LANES,
    inputs_of_vector,
    native_shape,
    pack_native,
    unpack_native,
)
from pallas_kernels.quantized_matmul import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight
from pallas_kernels.quantized_matmul import dequantize as dequantize_operand
from pallas_kernels.quantized_matmul.formats import (
    NIBBLES,
    PIECE,
    pack_int4,
    packed_columns,
    unpack_int4,
)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight is kept on a device, and what is done to activations before the product.

    Attributes:
        stored: kind, group and zeros. `stored.activations`: what the product does: "float"
            multiplies them as they are, "int8" and "fp8" round them, by row, or by group where the
            weight has groups.
        native: kept for the C++ kernels of a CPU, else for the other kernels.
        parts: of 4-bit elements that are not native: equal parts of the inputs that are packed
            apart, for as many devices, where a device's part is no multiple of what is packed
            together. Of native experts: the devices that divide their outputs, for which the
            blocks of each expert are apart. 1: neither.
        experts: whether the weight is one of experts, each a matrix of its own.
        words: of 4-bit elements that are not native: a row, or a part of one, is filled up with
            zeros to a multiple of so many words, and where it is, its scales by group as well.
            Those are finite: a kernel multiplies zeros with them.
    """

    stored: Encoding
    native: bool
    parts: int = 1
    experts: bool = False
    words: int = PIECE

    def divided(self, inputs: int, devices: int) -> WeightFormat:
        """The format of a weight whose inputs are divided among devices.

        Raises:
            ValidationError: a group of inputs that share a scale, or a vector of the native
                kernels, would be on two devices.
        """
        kind, group = self.stored.kind, self.stored.group or 1
        if inputs % (devices * group):
            raise ValidationError(
                "tensor_parallel_size",
                devices,
                f"a number of devices that divides {inputs} inputs of {kind} weights "
                f"into whole groups of {self.stored.group}",
            )
        if self.in_blocks:
            self._require_whole(devices, inputs, inputs_of_vector(kind == "int4"), "inputs")
            return self
        packed_whole = kind != "int4" or inputs % (devices * NIBBLES * self.words) == 0
        return replace(self, parts=1 if packed_whole else devices)

    def with_divided_outputs(self, outputs: int, devices: int, *, experts: bool) -> WeightFormat:
        """The format of a weight whose outputs are divided among devices.

        Args:
            outputs: that are divided: of each expert, or of the whole weight.
            devices: that divide them.
            experts: whether the weight is one of experts.

        Raises:
            ValidationError: a block of outputs of the native kernels would be on two devices.
        """
        if not self.in_blocks:
            return self
        self._require_whole(devices, outputs, LANES, "outputs")
        return replace(self, parts=devices) if experts else self

    def _require_whole(self, devices: int, size: int, unit: int, noun: str) -> None:
        if size % (devices * unit):
            raise ValidationError(
                "linear_backend",
                "native",
                f"xla where tensor_parallel_size is {devices}: {size} {noun} of "
                f"{self.stored.kind} weights are no whole blocks of {unit} on each device",
            )

    @property
    def is_channel8(self) -> bool:
        """Whether the weight is the 8-bit one of `pallas_kernels.linear`, with rounded rows."""
        stored = self.stored
        plain = stored.kind == "int8" and stored.group is None and stored.zeros == "none"
        rounded = stored.activations == "int8" and not stored.static
        return plain and rounded and not stored.ordered

    @property
    def by_output(self) -> bool:
        """Whether scales are one an output."""
        grouped = self.native or self.stored.kind == "int4" or self.stored.group is not None
        return self.is_channel8 or not grouped

    def by_group(self, array: Any) -> Any:
        """Scales or zeros [*out, groups] as they are kept: in the order in which kernels read them,
        since a TPU would bring them into that order at every step."""
        if self.in_blocks:
            return np.ascontiguousarray(np.moveaxis(array, -1, 0))
        (*out, groups), matrices = array.shape, array.shape[:1] if self.experts else ()
        missing = self.kept_groups(groups * (self.stored.group or 0)) - groups
        if self.stored.group and missing:
            by_part = array.reshape(*out, self.parts, -1)
            width = [*((0, 0) for _ in range(array.ndim)), (0, missing // self.parts)]
            array = np.pad(by_part, width).reshape(*out, -1)
        by_row = array.reshape(*matrices, -1, array.shape[-1])
        return np.ascontiguousarray(by_row.swapaxes(-1, -2))

    @property
    def in_blocks(self) -> bool:
        """Whether stored elements are in blocks of outputs, as a `NativeWeight` has them."""
        return self.native and not self.is_channel8

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the stored elements of a weight [*out, in]."""
        if self.in_blocks:
            nibbles = self.stored.kind == "int4"
            if self.parts > 1:
                return (shape[0], *native_shape(math.prod(shape[1:-1]), shape[-1], nibbles))
            return native_shape(math.prod(shape[:-1]), shape[-1], nibbles)
        columns = shape[-1]
        if self.stored.kind == "int4":
            columns = self.parts * self._columns(columns // self.parts)
        return (*shape[:-1], columns)

    def kept_groups(self, inputs: int) -> int:
        """Scales of a row of so many elements, as they are kept."""
        groups, part = self.stored.groups(inputs), inputs // self.parts
        if self.native or self.stored.kind != "int4" or self.stored.group is None:
            return groups
        columns = self._columns(part)
        if columns == packed_columns(part):
            return groups
        return self.parts * NIBBLES * columns // self.stored.group

    def _columns(self, inputs: int) -> int:
        """Words of a row of so many 4-bit elements."""
        return -(-packed_columns(inputs) // self.words) * self.words

    @property
    def dtype(self) -> np.dtype:
        """Of the stored elements."""
        if self.stored.kind == "int4":
            return np.dtype(np.int8 if self.native else np.uint16)
        if self.stored.kind == "int8" and self.native:
            return np.dtype(np.uint8)
        return ELEMENTS[self.stored.kind]

    @property
    def scale_dtype(self) -> np.dtype:
        """Of the scales."""
        return jnp.dtype(self.stored.scales)

    @property
    def zero_dtype(self) -> np.dtype | None:
        """Of zeros: integers, or what is to be subtracted from the products; None: none."""
        if self.stored.zeros == "none":
            return None
        return np.dtype(np.float32 if self.native else np.uint8)

    def as_kept(
        self, elements: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Elements [rows, in] and zeros [rows, groups] of a checkpoint as they are kept.

        Rows in blocks are 16 or a multiple, or the last.
        """
        kind = self.stored.kind
        kept = elements
        if kind == "int4" and not self.native:
            by_part = elements.reshape(len(elements) * self.parts, -1)
            packed = pack_int4(by_part)
            missing = self._columns(by_part.shape[1]) - packed.shape[1]
            kept = np.pad(packed, ((0, 0), (0, missing))).reshape(len(elements), -1)
        elif self.dtype == np.uint8:
            kept = elements.view(np.uint8) ^ np.uint8(0x80)
        if self.in_blocks:
            kept = pack_native(kept, kind == "int4")
        if zeros is None or self.zero_dtype != np.float32:
            return kept, zeros
        return kept, zeros if zeros.dtype == np.float32 else zeros.astype(np.float32) * scales


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "zero", "order", "input_scale"),
    meta_fields=("shape", "format"),
)
@dataclass(frozen=True, slots=True)
class QuantArray:
    """A weight [*out, in] of few bits.

    Attributes:
        values: as `format` keeps them.
        scale: [groups, N] of N outputs, of experts [E, groups, N]; [groups, *out] where
            `format.in_blocks`. Of `format.scale_dtype`.
        zero: of the shape of `scale`; None: none.
        order: int32 [in], the input of each column; None: as they stand.
        input_scale: float32 [1] of activations that are rounded with it; None: with their own.
        shape: [*out, in].
        format: how it is kept.
    """

    values: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    order: jax.Array | None
    input_scale: jax.Array | None
    shape: tuple[int, ...]
    format: WeightFormat

    @staticmethod
    def empty(shape: tuple[int, ...], format: WeightFormat) -> QuantArray:
        """A weight [*out, in] with zeros everywhere in the arrays."""
        out, inputs = shape[:-1], shape[-1]
        groups = format.kept_groups(inputs)
        matrices = out[:1] if format.experts else ()
        by_group = (*matrices, groups, math.prod(out[len(matrices) :]))
        scale = jnp.zeros((groups, *out) if format.in_blocks else by_group, format.scale_dtype)
        zero = None if format.zero_dtype is None else jnp.zeros(scale.shape, format.zero_dtype)
        order = jnp.zeros(inputs, jnp.int32) if format.stored.ordered else None
        values = jnp.zeros(format.values_shape(shape), format.dtype)
        input_scale = jnp.zeros(1, jnp.float32) if format.stored.static else None
        return QuantArray(values, scale, zero, order, input_scale, shape, format)

    def leaf_axes(self, axes: tuple[str | None, ...]) -> list[tuple[str | None, ...]]:
        """Logical axes of each array, given those of [*out, in], in the order of the tree."""
        out, last = axes[:-1], axes[-1]
        scale: tuple[str | None, ...] = (last, out[0])
        if self.format.experts:
            scale = out[0], last, out[1]
        values = axes
        if self.format.in_blocks:  # blocks of the outputs, of which the first axis is divided
            first = out[:2] if self.format.parts > 1 else out[:1]
            values, scale = (*first, last), (last, *out)
        zero = [] if self.zero is None else [scale]
        order: list[tuple[str | None, ...]] = [] if self.order is None else [(None,)]
        static: list[tuple[str | None, ...]] = [] if self.input_scale is None else [(None,)]
        return [values, scale, *zero, *order, *static]

    def with_arrays(
        self, values: Any, scales: Any, zeros: Any, order: Any, input_scale: Any
    ) -> QuantArray:
        """The same weight of arrays whose scales and zeros are [*out, groups]."""
        return replace(
            self,
            values=values,
            scale=self.format.by_group(scales),
            zero=None if zeros is None else self.format.by_group(zeros),
            order=order,
            input_scale=input_scale,
        )

    def stored_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Elements [*out, in], float32 scales and zeros [*out, groups] on the host, the inverse of
        `WeightFormat.as_kept` and `with_arrays`.

        4-bit elements are unsigned, 8-bit ones signed. Zeros of a weight for native kernels are
        float32 and times their scales.
        """
        out, inputs = self.shape[:-1], self.shape[-1]
        values = np.asarray(self.values)
        if self.format.in_blocks:
            blocks = values.reshape(-1, values.shape[-1])
            values = np.asarray(unpack_native(blocks, math.prod(out), inputs))
        elif self.format.stored.kind == "int4":
            parts = self.format.parts
            packed = self.values.reshape(-1, values.shape[-1] // parts)
            values = np.asarray(unpack_int4(packed, inputs // parts))
        if self.format.dtype == np.uint8:
            values = (values ^ np.uint8(0x80)).view(np.int8)

        def by_output(found: Any) -> np.ndarray:
            array = np.asarray(found)
            if self.format.in_blocks:
                return np.ascontiguousarray(np.moveaxis(array, 0, -1))
            return np.asarray(self._by_input(array)).reshape(*out, -1)

        zeros = None if self.zero is None else by_output(self.zero)
        return values.reshape(self.shape), by_output(self.scale).astype(np.float32), zeros

    def operand(self) -> jax.Array | QuantizedWeight | NativeWeight:
        """The weight as a matrix [N, K] for `pallas_kernels.linear`."""
        values = self.values.reshape(-1, self.values.shape[-1])
        if self.format.is_channel8:
            return values
        if self.format.by_output:
            kind: Any = Int8Weight if self.format.stored.kind == "int8" else Fp8Weight
            weight: QuantizedWeight = kind(values, self.scale.reshape(-1))
            return weight
        scale = self.scale.reshape(len(self.scale), -1)
        zero = None if self.zero is None else self.zero.reshape(scale.shape)
        if self.format.native:
            return NativeWeight(values, scale, zero)
        if self.format.stored.kind == "fp8":
            return Fp8Weight(values, scale)
        return Int4Weight(values, scale, zero)

    def _by_input(self, array: Any) -> Any:
        """Scales or zeros that are kept in the order of kernels as [N, groups], without fill."""
        groups, kept = self.format.stored.groups(self.shape[-1]), array.shape[-2]
        by_row = array.swapaxes(-1, -2).reshape(-1, kept)
        if kept == groups:
            return by_row
        parts = self.format.parts
        by_part = by_row.reshape(-1, parts, kept // parts)[..., : groups // parts]
        return by_part.reshape(-1, groups)

    def operand_of_groups(self) -> QuantizedWeight | NativeWeight:
        """A weight [E, out, in] of experts for `pallas_kernels.grouped_linear`."""
        if self.format.native:
            values = self.values.reshape(self.shape[0], -1, self.values.shape[-1])
            return NativeWeight(values, self.scale, self.zero)
        if self.format.stored.kind == "int4":
            return Int4Weight(self.values, self.scale, self.zero)
        kind: Any = Int8Weight if self.format.stored.kind == "int8" else Fp8Weight
        scale = self.scale.reshape(len(self.scale), -1) if self.format.by_output else self.scale
        weight: QuantizedWeight = kind(self.values, scale)
        return weight

    def dequantize(self) -> jax.Array:
        """The weight float32 [*out, in]."""
        inputs, given = self.shape[-1], self
        if not (self.format.in_blocks or self.format.by_output):
            scale, zero = jax.tree.map(lambda one: self._by_input(one).T, (self.scale, self.zero))
            given = replace(self, scale=scale, zero=zero)
        operand = given.operand()
        if isinstance(operand, Int4Weight):
            parts = self.format.parts
            apart = operand.packed.reshape(len(operand.packed) * parts, -1)
            nibbles = unpack_int4(apart, inputs // parts).reshape(-1, inputs)
            operand = operand._replace(packed=pack_int4(nibbles))
        if isinstance(operand, NativeWeight):
            wide = _native_values(operand, self)
        elif isinstance(operand, jax.Array):
            integers = operand.astype(jnp.float32) - (128 if operand.dtype == jnp.uint8 else 0)
            wide = integers * self.scale.reshape(-1, 1)
        else:
            wide = dequantize_operand(operand, inputs)
        if self.order is not None:
            wide = jnp.zeros_like(wide).at[:, self.order].set(wide)
        return wide.reshape(self.shape)


def _native_values(weight: NativeWeight, array: QuantArray) -> jax.Array:
    """float32 [N, K] of a weight for native kernels."""
    stored, inputs = array.format.stored, array.shape[-1]
    elements = unpack_native(weight.values, weight.scale.shape[1], inputs).astype(jnp.float32)
    middles = {"int4": INT4_ZERO if stored.zeros == "none" else 0, "int8": 128, "fp8": 0}
    elements = elements - middles[stored.kind]

    def spread(by_group: jax.Array) -> jax.Array:
        return jnp.repeat(by_group.T, stored.group or inputs, axis=1)[:, :inputs]

    wide = elements * spread(weight.scale)
    return wide if weight.offset is None else wide - spread(weight.offset)

"""quantized_matmul for TPUs in Pallas Mosaic.

The grid runs over blocks of output channels and, innermost, over blocks of K. Pallas streams the
stored weights of the next grid step into VMEM while this one multiplies. Weights are converted in
VMEM, x stays in its own type, and sums are kept in a float32 scratch block until K is done.
Scales apply to the sums, where output channels lie along lanes as they do in the stored scales.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels import interpreter
from pallas_kernels.backends.mosaic_tpu import TpuMatmulTuning
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.activations import Rows, split_rows
from pallas_kernels.quantized_matmul.formats import (
    BLOCK,
    NIBBLES,
    PIECE,
    SYMMETRIC_ZERO,
    Int4Weight,
    QuantizedWeight,
    group_of,
    group_scales,
    outputs_of,
)

LANES = 128
ROW_MULTIPLE = 32  # sublanes of a tile of 8-bit elements; enough for every type of x
TILE_ROWS = 256
TILE_CHANNELS = 256
MAX_WIDTH = 2048  # inputs of a grid step


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The static facts of a grid step.

    Attributes:
        tile_rows: rows of x of a grid step.
        tile_channels: output channels of a grid step.
        width: inputs of a grid step.
        group: inputs that share a scale of 4-bit weights; None when one scale serves a row.
        has_zeros: whether 4-bit weights have zero points of their own.
    """

    tile_rows: int
    tile_channels: int
    width: int
    group: int | None
    has_zeros: bool


def _product(x: jax.Array, weights: jax.Array, sum_type: Any) -> jax.Array:
    return lax.dot_general(
        x,
        weights,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=sum_type,
    )


def _four_bits(x_ref: Any, weight_ref: Any, scales_ref: Any, zeros_ref: Any, plan: TilePlan) -> Any:
    """float32[tile_rows, tile_channels]: the part of the sums that this step adds."""
    words = weight_ref[...].astype(jnp.int32)
    total = jnp.zeros((plan.tile_rows, plan.tile_channels), jnp.float32)
    for first in range(0, plan.width, LANES):
        block, nibble = divmod(first, BLOCK)
        held = words[:, block * PIECE : (block + 1) * PIECE]
        nibble //= PIECE
        halves = [(held >> (4 * (nibble + i))) & 15 for i in range(LANES // PIECE)]
        values = jnp.concatenate(halves, axis=1)  # [tile_channels, 128]
        if not plan.has_zeros:
            values = values - SYMMETRIC_ZERO
        weights = values.astype(jnp.float32).astype(x_ref.dtype)
        x = x_ref[:, first : first + LANES]
        size = min(plan.group or LANES, LANES)
        for inside in range(0, LANES, size):
            member = x
            if size < LANES:
                lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
                member = jnp.where((lane >= inside) & (lane < inside + size), x, jnp.zeros_like(x))
            part = _product(member, weights, jnp.float32)
            group = (first + inside) // plan.group if plan.group else 0
            if plan.has_zeros:
                sums = member.astype(jnp.float32).sum(axis=1, keepdims=True)
                zero = zeros_ref[pl.ds(group, 1), :].astype(jnp.int32).astype(jnp.float32)
                part = part - sums * zero
            if plan.group:
                part = part * scales_ref[pl.ds(group, 1), :]
            total = total + part
    return total


def _kernel(
    x_ref: Any,  # [tile_rows, width]
    weight_ref: Any,  # [tile_channels, width], or uint16[tile_channels, width / 4]
    scales_ref: Any,  # float32[groups of the step or 1, tile_channels]
    zeros_ref: Any,  # int32[groups of the step or 1, tile_channels]
    row_scale_ref: Any,  # float32[tile_rows, 1]
    out_ref: Any,  # [tile_rows, tile_channels]
    sums_ref: Any,  # [tile_rows, tile_channels]
    *,
    plan: TilePlan,
) -> None:
    refs = x_ref, weight_ref, scales_ref, zeros_ref, row_scale_ref, out_ref, sums_ref
    add_tile(*refs, step=pl.program_id(2), steps=pl.num_programs(2), plan=plan)


def add_tile(
    x_ref: Any,
    weight_ref: Any,
    scales_ref: Any,
    zeros_ref: Any,
    row_scale_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    *,
    step: Any,
    steps: Any,
    plan: TilePlan,
) -> None:
    """A grid step: one of so many steps over K; with the last one the result is written.

    Args:
        x_ref, weight_ref, scales_ref, zeros_ref, row_scale_ref, out_ref, sums_ref: as `_kernel`.
            Weights that are not quantised are of the type of x, and their scales are 1.
    """

    @pl.when(step == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    if weight_ref.dtype == jnp.uint16:
        sums_ref[...] += _four_bits(x_ref, weight_ref, scales_ref, zeros_ref, plan)
    else:
        x, weights = x_ref[...], weight_ref[...]
        if x.dtype != jnp.int8:
            weights = weights.astype(jnp.float32).astype(x.dtype)
        sums_ref[...] += _product(x, weights, sums_ref.dtype)

    @pl.when(step == steps - 1)
    def _() -> None:
        total = sums_ref[...].astype(jnp.float32)
        if plan.group is None:
            total = total * scales_ref[...]
        if x_ref.dtype == jnp.int8:
            total = total * row_scale_ref[...]
        out_ref[...] = total.astype(out_ref.dtype)


def _check(tuning: TpuMatmulTuning) -> None:
    for name, unit in {"tile_m": ROW_MULTIPLE, "tile_n": LANES}.items():
        if getattr(tuning, name) % unit:
            raise KernelError(f"tuning.{name}", getattr(tuning, name), f"a multiple of {unit}")


def _plan(x: jax.Array, weight: QuantizedWeight, tuning: TpuMatmulTuning | None) -> TilePlan:
    rows, inputs = x.shape
    is_int4 = isinstance(weight, Int4Weight)
    group = group_of(weight, inputs) if isinstance(weight, Int4Weight) else inputs
    channels = tuning.tile_n if tuning else TILE_CHANNELS
    return TilePlan(
        tile_rows=min(
            -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, tuning.tile_m if tuning else TILE_ROWS
        ),
        tile_channels=channels if outputs_of(weight) % channels == 0 else LANES,
        width=width_of(inputs, group, is_int4, tuning.tile_k if tuning else MAX_WIDTH),
        group=group if group < inputs else None,
        has_zeros=isinstance(weight, Int4Weight) and weight.zeros is not None,
    )


def width_of(inputs: int, group: int, is_int4: bool, wanted: int = MAX_WIDTH) -> int:
    """Inputs of a grid step: the widest part of a row up to `wanted` that divides it.

    Args:
        inputs: of a row; the whole row always is a legal block.
        group: inputs that share a scale.
        is_int4: whether they are packed.
    """
    step_groups = 8 * group if group < inputs else 1  # scales are tiles of 8 sublanes
    unit = max(2 * BLOCK if is_int4 else LANES, step_groups)
    wanted = max(min(wanted, MAX_WIDTH), unit)
    widths = [width for width in range(unit, wanted + 1, unit) if inputs % width == 0]
    return max(widths, default=inputs)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning", "interpret"))
def matmul(
    x: Rows,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    out_dtype: DTypeLike,
    tuning: TpuMatmulTuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [1, M, N]
    """x @ weight.T on a TPU as one part; the shapes are those that its record takes.

    Args:
        x: float32 or bfloat16; or integers of 8 bits.
        weight: the quantised weight.
        out_dtype: type of the result.
        tuning: tile_m (a multiple of 32), tile_n (of 128) and tile_k; None chooses.
        interpret: True or pltpu.InterpretParams runs the kernel without a TPU; None compiles.
    """
    if tuning is not None:
        _check(tuning)
    operand, row_scale = split_rows(x)
    rows, inputs = operand.shape
    outputs = outputs_of(weight)
    plan = _plan(operand, weight, tuning)
    row_scale = jnp.ones((rows,), jnp.float32) if row_scale is None else row_scale
    padding = -rows % plan.tile_rows
    operand = jnp.pad(operand, ((0, padding), (0, 0)))
    row_scale = jnp.pad(row_scale, (0, padding))[:, None]
    scales, zeros = group_scales(weight)
    zeros = jnp.zeros((1, outputs), jnp.int32) if zeros is None else zeros.astype(jnp.int32)
    stored_width = plan.width // NIBBLES if isinstance(weight, Int4Weight) else plan.width
    step_groups = plan.width // plan.group if plan.group else 1

    def vectors(array: jax.Array) -> pl.BlockSpec:
        if plan.group and array.shape[0] > 1:
            return pl.BlockSpec((step_groups, plan.tile_channels), lambda n, m, k: (k, n))
        return pl.BlockSpec((1, plan.tile_channels), lambda n, m, k: (0, n))

    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(
            outputs // plan.tile_channels,
            operand.shape[0] // plan.tile_rows,
            inputs // plan.width,
        ),
        in_specs=[
            pl.BlockSpec((plan.tile_rows, plan.width), lambda n, m, k: (m, k)),
            pl.BlockSpec((plan.tile_channels, stored_width), lambda n, m, k: (n, k)),
            vectors(scales),
            vectors(zeros),
            pl.BlockSpec((plan.tile_rows, 1), lambda n, m, k: (m, 0)),
        ],
        out_specs=pl.BlockSpec((plan.tile_rows, plan.tile_channels), lambda n, m, k: (m, n)),
        out_shape=result_like(operand, (operand.shape[0], outputs), out_dtype),
        scratch_shapes=[
            pltpu.VMEM(
                (plan.tile_rows, plan.tile_channels),
                jnp.int32 if operand.dtype == jnp.int8 else jnp.float32,
            )
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpreter.of_call(interpret),
        name="quantized_matmul",
    )(operand, weight[0], scales, zeros, row_scale)
    return out[None, :rows]

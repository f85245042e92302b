"""quantized_matmul for NVIDIA GPUs without wgmma, by Pallas' Triton backend.

A program owns one tile of the result and one part of K. It loads a tile of x and a tile of stored
weights a step, converts the weights in registers and multiplies on the tensor cores; with
activations="int8" both stay integers. The loads of later steps are put ahead of the products by
Triton's own pipelining. Tails of every dimension are masked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels import interpreter
from pallas_kernels.backends.triton import TritonMatmulTuning
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.quantized_matmul.activations import rounded_rows
from pallas_kernels.quantized_matmul.formats import (
    BLOCK,
    NIBBLES,
    PIECE,
    SYMMETRIC_ZERO,
    Fp8Weight,
    Int4Weight,
    QuantizedWeight,
    group_of,
    group_scales,
    outputs_of,
)
from pallas_kernels.quantized_matmul.splits import Tiling, number_of_splits, step_bytes

MIN_TILE = 16  # the smallest side of a tensor-core product
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Plan:
    """The static facts of the kernel.

    Attributes:
        tile_rows: rows of x of a program.
        tile_channels: output channels of a program.
        width: inputs of a step.
        splits: parts of K.
        group: inputs that share a scale of 4-bit weights; None when one scale serves a row.
        has_zeros: whether 4-bit weights have zero points of their own.
        is_fp8: whether the stored bytes are float8_e4m3fn.
    """

    tile_rows: int
    tile_channels: int
    width: int
    splits: int
    group: int | None
    has_zeros: bool
    is_fp8: bool


def _load(ref: Any, rows: jax.Array, columns: jax.Array, row_end: int, column_end: int) -> Any:
    """A tile by the indices of its rows and columns, zero beyond the ends."""
    mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    shape = (rows.shape[0], columns.shape[0])
    index = (
        lax.broadcast_in_dim(rows, shape, [0]),
        lax.broadcast_in_dim(columns, shape, [1]),
    )
    return plt.load(ref.at[index], mask=mask, other=0)


def _vector(ref: Any, row: Any, columns: jax.Array, row_end: int, column_end: int) -> Any:
    mask = (columns < column_end) & (row < row_end)
    return plt.load(ref.at[jnp.minimum(row, row_end - 1), columns], mask=mask, other=0)


def _from_fp8(stored: jax.Array, dtype: Any) -> jax.Array:
    """float8_e4m3fn, as its bits, in another type: a float16 with an exponent 8 too small."""
    bits = stored.astype(jnp.int32)
    moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).astype(jnp.uint16)
    half = lax.bitcast_convert_type(moved, jnp.float16)
    return (half.astype(jnp.float32) * 256.0).astype(dtype)


def _kernel(
    x_ref: Any,  # [M, K]
    weight_ref: Any,  # [N, K] or uint16[N, K / 4]
    scales_ref: Any,  # float32[groups, N]
    zeros_ref: Any,  # uint8[groups, N]
    row_scale_ref: Any,  # float32[1, M]
    out_ref: Any,  # [splits, M, N]
    *,
    plan: _Plan,
) -> None:
    rows_end, inputs = x_ref.shape
    channels_end, stored_columns = weight_ref.shape
    groups = scales_ref.shape[0]
    split = pl.program_id(2)
    rows = pl.program_id(1) * plan.tile_rows + jnp.arange(plan.tile_rows)
    channels = pl.program_id(0) * plan.tile_channels + jnp.arange(plan.tile_channels)
    tile = (plan.tile_rows, plan.tile_channels)
    steps = -(-inputs // plan.width)
    share = -(-steps // plan.splits)
    begin = split * share
    end = jnp.minimum(begin + share, steps)
    integers = x_ref.dtype == jnp.int8
    sum_type = jnp.int32 if integers else jnp.float32

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.dot_general(
            x,
            weights.T,
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=sum_type,
        )

    def eight_bits(step: jax.Array, total: jax.Array) -> jax.Array:
        columns = step * plan.width + jnp.arange(plan.width)
        x = _load(x_ref, rows, columns, rows_end, inputs)
        held = _load(weight_ref, channels, columns, channels_end, inputs)
        held = _from_fp8(held, x.dtype) if plan.is_fp8 else held.astype(x.dtype)
        return total + product(x, held)

    size = min(plan.group or PIECE, PIECE)

    def four_bits(step: jax.Array, total: jax.Array) -> jax.Array:
        waiting = jnp.zeros(tile, jnp.float32)
        for first in range(0, PIECE, size):
            words = step * PIECE + first + jnp.arange(size)
            held = _load(weight_ref, channels, words, channels_end, stored_columns)
            held = held.astype(jnp.int32)
            for nibble in range(NIBBLES):
                column = step * BLOCK + nibble * PIECE + first
                x = _load(x_ref, rows, column + jnp.arange(size), rows_end, inputs)
                group = column // plan.group if plan.group else 0
                values = (held >> (4 * nibble)) & 15
                if plan.has_zeros:
                    zero = _vector(zeros_ref, group, channels, groups, channels_end)
                    values = values - lax.broadcast_in_dim(
                        zero.astype(jnp.int32), values.shape, [0]
                    )
                else:
                    values = values - SYMMETRIC_ZERO
                waiting = waiting + product(x, values.astype(jnp.float32).astype(x.dtype))
                if plan.group and (nibble + 1) * PIECE % plan.group == 0:
                    scale = _vector(scales_ref, group, channels, groups, channels_end)
                    total = total + waiting * lax.broadcast_in_dim(scale, tile, [1])
                    waiting = jnp.zeros(tile, jnp.float32)
        return total + waiting if plan.group is None else total

    body = four_bits if weight_ref.dtype == jnp.uint16 else eight_bits
    total = lax.fori_loop(begin, end, body, jnp.zeros(tile, sum_type)).astype(jnp.float32)
    if plan.group is None:
        scale = _vector(scales_ref, 0, channels, groups, channels_end)
        total = total * lax.broadcast_in_dim(scale, tile, [1])
    if integers:
        scale = _vector(row_scale_ref, 0, rows, 1, rows_end)
        total = total * lax.broadcast_in_dim(scale, tile, [0])
    index = (
        jnp.full(tile, split, jnp.int32),
        lax.broadcast_in_dim(rows, tile, [0]),
        lax.broadcast_in_dim(channels, tile, [1]),
    )
    mask = (rows < rows_end)[:, None] & (channels < channels_end)[None, :]
    plt.store(out_ref.at[index], total.astype(out_ref.dtype), mask=mask)


def _check(tuning: TritonMatmulTuning) -> None:
    """Triton has arrays of powers of two only."""
    for name, least in {
        "tile_m": MIN_TILE,
        "tile_n": MIN_TILE,
        "tile_k": MIN_TILE,
        "num_warps": 1,
    }.items():
        value = getattr(tuning, name)
        if value < least or value & (value - 1):
            raise KernelError(f"tuning.{name}", value, f"a power of two, at least {least}")


def _plan(x: jax.Array, weight: QuantizedWeight, tuning: TritonMatmulTuning | None) -> _Plan:
    rows, inputs = x.shape
    is_int4 = isinstance(weight, Int4Weight)
    group = group_of(weight, inputs) if isinstance(weight, Int4Weight) else inputs
    few = rows <= FEW_ROWS
    # a sum of a group and the total, both of 128 x 128, would not fit the registers
    default = FEW_ROWS if is_int4 else 128
    wanted = tuning.tile_m if tuning else default
    tile_rows = max(MIN_TILE, min(pl.next_power_of_2(rows), wanted))
    tile_channels = tuning.tile_n if tuning else (64 if few else 128)
    width = BLOCK if is_int4 else (tuning.tile_k if tuning else 128 if few else 64)
    outputs = outputs_of(weight)
    row_tiles = -(-rows // tile_rows)
    stored = tile_channels * width // (2 if is_int4 else 1)
    tiling = Tiling(
        rows=rows,
        outputs=outputs,
        tiles=row_tiles * -(-outputs // tile_channels),
        steps=-(-inputs // width),
        step_bytes=step_bytes(tile_rows, tile_channels, width, stored, x.dtype.itemsize),
    )
    splits = tuning.splits if tuning else None
    return _Plan(
        tile_rows=tile_rows,
        tile_channels=tile_channels,
        width=width,
        splits=splits or number_of_splits(tiling, multiprocessors()),
        group=group if group < inputs else None,
        has_zeros=isinstance(weight, Int4Weight) and weight.zeros is not None,
        is_fp8=isinstance(weight, Fp8Weight),
    )


@functools.partial(jax.jit, static_argnames=("activations", "out_dtype", "tuning", "interpret"))
def matmul(
    x: jax.Array,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    activations: str,
    out_dtype: DTypeLike,
    input_scale: jax.Array | None = None,  # float32[1]
    tuning: TritonMatmulTuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [M, N]
    """x @ weight.T on an NVIDIA GPU.

    Args:
        x: float32, bfloat16 or float16.
        weight: the quantised weight.
        activations: "float" or "int8".
        out_dtype: type of the result.
        input_scale: of rounded activations; None: each row's own.
        tuning: tile sizes, stages, warps and splits; None chooses them from the shapes.
        interpret: True runs the kernel without a GPU; None or False compiles.
    """
    if tuning is not None:
        _check(tuning)
    rows, outputs = x.shape[0], outputs_of(weight)
    plan = _plan(x, weight, tuning)
    operand, row_scale = rounded_rows(x, activations, input_scale)
    row_scale = jnp.ones((rows,), jnp.float32) if row_scale is None else row_scale
    stored, (scales, zeros) = weight[0], group_scales(weight)
    zeros = jnp.zeros((1, 1), jnp.uint8) if zeros is None else zeros
    if isinstance(weight, Fp8Weight):
        # Ampere has no conversion from float8, and Triton refuses the type there
        stored = lax.bitcast_convert_type(stored, jnp.uint8)
    partial_type = out_dtype if plan.splits == 1 else jnp.float32
    few = rows <= FEW_ROWS
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(-(-outputs // plan.tile_channels), -(-rows // plan.tile_rows), plan.splits),
        out_shape=result_like(operand, (plan.splits, rows, outputs), partial_type),
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps if tuning else (4 if few else 8),
            num_stages=tuning.stages if tuning else (4 if few else 3),
        ),
        interpret=interpreter.is_used_by_triton(interpret),
        name="quantized_matmul",
    )(operand, stored, scales, zeros, row_scale[None])
    if plan.splits == 1:
        return out[0]
    return out.sum(axis=0).astype(out_dtype)

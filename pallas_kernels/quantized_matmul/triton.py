"""quantized_matmul for NVIDIA GPUs without wgmma, by Pallas' Triton backend.

A program owns one tile of the result and one part of K, and adds it up as `triton_tile` does. The
loads of later steps are put ahead of the products by Triton's own pipelining. Tails of every
dimension are masked.
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
from pallas_kernels.quantized_matmul.activations import Rows, split_rows
from pallas_kernels.quantized_matmul.formats import (
    BLOCK,
    Fp8Weight,
    Int4Weight,
    QuantizedWeight,
    group_of,
    group_scales,
    outputs_of,
)
from pallas_kernels.quantized_matmul.splits import Tiling, number_of_splits, step_bytes
from pallas_kernels.quantized_matmul.triton_tile import (
    TileFormat,
    TileOperands,
    kind_of,
    tile_sums,
)

MIN_TILE = 16  # the smallest side of a tensor-core product
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Plan:
    """The static facts of the kernel.

    Attributes:
        tile_rows: rows of x of a program.
        tile_channels: output channels of a program.
        splits: parts of K.
        format: of the weight.
    """

    tile_rows: int
    tile_channels: int
    splits: int
    format: TileFormat

    @property
    def width(self) -> int:
        """Inputs of a step."""
        return self.format.width


def _kernel(
    x_ref: Any,  # [M, K]
    weight_ref: Any,  # [1, N, K] or uint16[1, N, K / 4]
    scales_ref: Any,  # float32[groups, 1, N]
    zeros_ref: Any,  # uint8[groups, 1, N], or None
    row_scale_ref: Any,  # float32[1, M] of rounded rows, or None
    out_ref: Any,  # [splits, M, N]
    *,
    plan: _Plan,
) -> None:
    rows_end, inputs = x_ref.shape
    channels_end = weight_ref.shape[1]
    split = pl.program_id(2)
    rows = pl.program_id(1) * plan.tile_rows + jnp.arange(plan.tile_rows)
    channels = pl.program_id(0) * plan.tile_channels + jnp.arange(plan.tile_channels)
    counted = rows < rows_end
    tile = (plan.tile_rows, plan.tile_channels)
    steps = -(-inputs // plan.width)
    share = -(-steps // plan.splits)
    begin = split * share
    (total,) = tile_sums(
        TileOperands(x_ref, weight_ref, scales_ref, zeros_ref, row_scale_ref),
        plan.format,
        matrix=0,
        rows=rows,
        counted=counted,
        channels=(channels,),
        steps=(begin, jnp.minimum(begin + share, steps)),
    )
    index = (
        jnp.full(tile, split, jnp.int32),
        lax.broadcast_in_dim(rows, tile, [0]),
        lax.broadcast_in_dim(channels, tile, [1]),
    )
    mask = counted[:, None] & (channels < channels_end)[None, :]
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
    group = group_of(weight, inputs)
    few = rows <= FEW_ROWS
    # a sum of a group and the total, both of 128 x 128, would not fit the registers
    default = FEW_ROWS if is_int4 else 128
    wanted = tuning.tile_m if tuning else default
    tile_rows = max(MIN_TILE, min(pl.next_power_of_2(rows), wanted))
    tile_channels = tuning.tile_n if tuning else (64 if few else 128)
    wanted_width = tuning.tile_k if tuning else 128 if few else 64
    width = BLOCK if is_int4 else min(wanted_width, group)
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
        splits=splits or number_of_splits(tiling, multiprocessors()),
        format=TileFormat(
            width,
            kind_of(weight),
            group=group if group < inputs else None,
        ),
    )


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning", "interpret"))
def matmul(
    x: Rows,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    out_dtype: DTypeLike,
    tuning: TritonMatmulTuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [S, M, N]
    """Parts of x @ weight.T on an NVIDIA GPU.

    Args:
        x: float32, bfloat16 or float16; or integers of 8 bits.
        weight: the quantised weight.
        out_dtype: type of a product that is one part.
        tuning: tile sizes, stages, warps and splits; None chooses them from the shapes.
        interpret: True runs the kernel without a GPU; None or False compiles.
    """
    if tuning is not None:
        _check(tuning)
    operand, row_scale = split_rows(x)
    rows, outputs = operand.shape[0], outputs_of(weight)
    plan = _plan(operand, weight, tuning)
    stored, (scales, zeros) = weight[0], group_scales(weight)
    if isinstance(weight, Fp8Weight):
        # Ampere has no conversion from float8, and Triton refuses the type there
        stored = lax.bitcast_convert_type(stored, jnp.uint8)
    few = rows <= FEW_ROWS
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(-(-outputs // plan.tile_channels), -(-rows // plan.tile_rows), plan.splits),
        out_shape=result_like(
            operand,
            (plan.splits, rows, outputs),
            out_dtype if plan.splits == 1 else jnp.float32,
        ),
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps if tuning else (4 if few else 8),
            num_stages=tuning.stages if tuning else (4 if few else 3),
        ),
        interpret=interpreter.is_used_by_triton(interpret),
        name="quantized_matmul",
    )(
        operand,
        stored[None],
        scales[:, None],
        None if zeros is None else zeros[:, None],
        None if row_scale is None else row_scale[None],
    )

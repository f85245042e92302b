"""quantized_matmul for NVIDIA GPUs without wgmma, by Pallas' Triton backend.

A program owns one tile of the result and one part of K, and adds it up as `triton_tile` does. The
loads of later steps are put ahead of the products by Triton's own pipelining. Tails of every
dimension are masked.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels import interpreter
from pallas_kernels.backends.triton import TritonMatmulTuning
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.quantized_matmul.formats import BLOCK
from pallas_kernels.quantized_matmul.operands import Operands
from pallas_kernels.quantized_matmul.splits import Tiling, number_of_splits
from pallas_kernels.quantized_matmul.triton_tile import for_triton, tile_of, tile_sums

MIN_TILE = 16  # the smallest side of a tensor-core product
FEW_ROWS = 64


def _kernel(
    refs: Operands,  # of weights [1, N, K]
    out_ref: Any,  # [splits, M, N]
    *,
    plan: TritonMatmulTuning,
) -> None:
    rows = pl.program_id(1) * plan.tile_m + jnp.arange(plan.tile_m)
    channels = pl.program_id(0) * plan.tile_n + jnp.arange(plan.tile_n)
    split, counted = pl.program_id(2), rows < refs.rows.shape[0]
    steps = -(-refs.rows.shape[1] // plan.tile_k)
    share = -(-steps // out_ref.shape[0])
    begin = split * share
    (total,) = tile_sums(
        refs,
        plan.tile_k,
        matrix=0,
        rows=rows,
        counted=counted,
        channels=(channels,),
        steps=(begin, jnp.minimum(begin + share, steps)),
    )
    view, mask = tile_of(out_ref, split, rows, counted, channels)
    plt.store(view, total.astype(out_ref.dtype), mask=mask)


def _check(tuning: TritonMatmulTuning) -> None:
    """Triton has arrays of powers of two only."""
    for name in ("tile_m", "tile_n", "tile_k", "num_warps"):
        value, least = getattr(tuning, name), 1 if name == "num_warps" else MIN_TILE
        if value < least or value & (value - 1):
            raise KernelError(f"tuning.{name}", value, f"a power of two, at least {least}")


def plan_of(operands: Operands, tuning: TritonMatmulTuning | None) -> TritonMatmulTuning:
    """All choices for a product: by its shape where none are given, and cut to it."""
    rows, inputs = operands.rows.shape
    if tuning is None:
        few = rows <= FEW_ROWS
        tuning = TritonMatmulTuning(
            # a sum of a group and the total, both of 128 x 128, would not fit the registers
            tile_m=FEW_ROWS if operands.is_int4 else 128,
            tile_n=64 if few else 128,
            tile_k=128 if few else 64,
            stages=4 if few else 3,
            num_warps=4 if few else 8,
        )
    tile_rows = max(MIN_TILE, min(pl.next_power_of_2(rows), tuning.tile_m))
    width = BLOCK if operands.is_int4 else min(tuning.tile_k, operands.group or inputs)
    tiling = Tiling.of(
        (rows, operands.outputs, inputs),
        (tile_rows, tuning.tile_n, width),
        tuning.tile_n * width // (2 if operands.is_int4 else 1),
        operands.rows.dtype.itemsize,
    )
    splits = tuning.splits or number_of_splits(tiling, multiprocessors())
    return replace(tuning, tile_m=tile_rows, tile_k=width, splits=splits)


def matmul(
    operands: Operands, *, out_dtype: DTypeLike, tuning: TritonMatmulTuning | None, interpret: Any
) -> jax.Array:  # [S, M, N]
    """Parts of x @ weight.T on an NVIDIA GPU.

    Args:
        operands: x is float32, bfloat16 or float16; or integers of 8 bits.
        out_dtype: type of a product that is one part.
        tuning: tile sizes, stages, warps and splits; None chooses them from the shapes.
        interpret: True runs the kernel without a GPU; None or False compiles.
    """
    if tuning is not None:
        _check(tuning)
    operands = for_triton(operands)
    rows, outputs = operands.rows.shape[0], operands.outputs
    plan = plan_of(operands, tuning)
    splits = plan.splits or 1
    result = result_like(
        operands.rows, (splits, rows, outputs), out_dtype if splits == 1 else jnp.float32
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(-(-outputs // plan.tile_n), -(-rows // plan.tile_m), splits),
        out_shape=result,
        compiler_params=plt.CompilerParams(num_warps=plan.num_warps, num_stages=plan.stages),
        interpret=interpreter.is_used_by_triton(interpret),
        name="quantized_matmul",
    )(operands.in_groups())

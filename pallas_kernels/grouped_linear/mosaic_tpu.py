"""Grouped linear layers for TPUs in Pallas Mosaic: one kernel for all groups.

The grid runs over blocks of rows of one group, tiles of outputs and, innermost, parts of K. The
group of a block is a prefetched scalar, by which Pallas streams the tiles of that group's matrix
from where it lies; what a grid step computes is that of `quantized_matmul`. Blocks without rows
name the tiles that are there already and compute nothing. The rows of blocks are gathered, and
brought back, by XLA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.grouped_linear.blocks import block_size, blocks_of
from pallas_kernels.grouped_linear.layer import Layer, sizes_of
from pallas_kernels.quantized_matmul.formats import NIBBLES, Int4Weight
from pallas_kernels.quantized_matmul.mosaic_tpu import (
    LANES,
    TILE_CHANNELS,
    TilePlan,
    add_tile,
    width_of,
)

LEAST_ROWS, MOST_ROWS = 32, 256  # of a block: whole tiles of 8 bits; a matrix is read once a block


def _kernel(groups: Any, counts: Any, *refs: Any, plan: TilePlan) -> None:
    del groups
    count, step, steps = counts[pl.program_id(0)], pl.program_id(2), pl.num_programs(2)

    @pl.when(count > 0)
    def _() -> None:
        add_tile(*refs, step=step, steps=steps, plan=plan)


@functools.partial(jax.jit, static_argnames="interpret")
def grouped_linear(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
    *,
    interpret: Any = None,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`."""
    operand, row_scale, stored, scales, zeros = layer.operands(x)
    rows, (groups, outputs) = x.shape[0], sizes_of(layer.weight)
    # matrix by matrix
    scales = jnp.ones((groups, 1, outputs)) if scales is None else scales.swapaxes(0, 1)
    zeros = None if zeros is None else zeros.swapaxes(0, 1).astype(jnp.int32)
    is_int4 = isinstance(layer.weight, Int4Weight)
    # a row of 4 bits may end within a block of its inputs: the rest meets zeros
    inputs = stored.shape[2] * NIBBLES if is_int4 else stored.shape[2]
    group = x.shape[1] // scales.shape[1]
    if operand.dtype == jnp.float16:  # which a TPU does not multiply
        operand = operand.astype(jnp.float32)
    operand = jnp.pad(operand, ((0, 0), (0, inputs - x.shape[1])))
    if scales.shape[1] > 1:
        missing = ((0, 0), (0, inputs // group - scales.shape[1]), (0, 0))
        scales = jnp.pad(scales, missing)
        zeros = None if zeros is None else jnp.pad(zeros, missing)
    else:
        group = inputs
    has_zeros = zeros is not None
    if zeros is None:
        zeros = jnp.zeros((groups, 1, outputs), jnp.int32)

    blocks = blocks_of(
        jnp.arange(rows, dtype=jnp.int32),
        sizes,
        block_size(rows, groups, LEAST_ROWS, MOST_ROWS),
    )
    plan = TilePlan(
        tile_rows=blocks.size,
        tile_channels=TILE_CHANNELS if outputs % TILE_CHANNELS == 0 else LANES,
        width=width_of(inputs, group, is_int4),
        group=group if group < inputs else None,
        has_zeros=has_zeros,
    )
    count, tiles, steps = len(blocks.groups), outputs // plan.tile_channels, inputs // plan.width

    def of_block(block: Any, step: Any, groups: Any, counts: Any) -> tuple[Any, Any]:
        del groups
        is_used = counts[block] > 0
        return jnp.where(is_used, block, 0), jnp.where(is_used, step, steps - 1)

    def of_matrix(block: Any, tile: Any, step: Any, groups: Any, counts: Any) -> tuple[Any, ...]:
        is_used = counts[block] > 0
        places = jnp.where(is_used, tile, tiles - 1), jnp.where(is_used, step, steps - 1)
        return groups[block], *places

    def of_result(block: Any, tile: Any, counts: Any) -> tuple[Any, Any]:
        # the last block stands for all without rows
        is_used = counts[block] > 0
        return jnp.where(is_used, block, count), jnp.where(is_used, tile, tiles - 1)

    def vectors(array: jax.Array) -> pl.BlockSpec:
        by_step = array.shape[1] > 1
        shape = (None, plan.width // group if by_step else 1, plan.tile_channels)

        def place(b: Any, n: Any, k: Any, groups: Any, counts: Any) -> tuple[Any, ...]:
            matrix, tile, step = of_matrix(b, n, k, groups, counts)
            return matrix, step if by_step else 0, tile

        return pl.BlockSpec(shape, place)

    stored_width = plan.width // NIBBLES if is_int4 else plan.width
    factors = jnp.ones(rows, jnp.float32) if row_scale is None else row_scale
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count, tiles, steps),
            in_specs=[
                pl.BlockSpec(
                    (plan.tile_rows, plan.width), lambda b, n, k, *table: of_block(b, k, *table)
                ),
                pl.BlockSpec((None, plan.tile_channels, stored_width), of_matrix),
                vectors(scales),
                vectors(zeros),
                pl.BlockSpec(
                    (plan.tile_rows, 1), lambda b, n, k, *table: (of_block(b, k, *table)[0], 0)
                ),
            ],
            out_specs=pl.BlockSpec(
                (plan.tile_rows, plan.tile_channels),
                lambda b, n, k, groups, counts: of_result(b, n, counts),
            ),
            scratch_shapes=[
                pltpu.VMEM(
                    (plan.tile_rows, plan.tile_channels),
                    jnp.int32 if operand.dtype == jnp.int8 else jnp.float32,
                )
            ],
        ),
        out_shape=result_like(operand, ((count + 1) * blocks.size, outputs), layer.out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpreter.of_call(interpret),
        name="grouped_linear",
    )(
        blocks.groups,
        blocks.counts,
        operand[blocks.rows],
        stored,
        scales,
        zeros,
        factors[blocks.rows, None],
    )

    # the place of each row: its block's first, and its own in it
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows)
    own = jnp.minimum(jnp.searchsorted(ends, row, side="right", method="compare_all"), groups - 1)
    first_block = (jnp.cumsum(-(-sizes // blocks.size)) - -(-sizes // blocks.size))[own]
    place = first_block * blocks.size + row - (ends[own] - sizes[own])
    out = out[jnp.minimum(place, count * blocks.size - 1)]
    if layer.gated:
        gate = out[:, ::2].astype(jnp.float32)
        out = (gate / (1.0 + jnp.exp(-gate))).astype(out.dtype) * out[:, 1::2]
    return jnp.where(row[:, None] < ends[-1], out, 0)

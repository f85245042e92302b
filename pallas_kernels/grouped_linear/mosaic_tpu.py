"""Grouped linear layers for TPUs in Pallas Mosaic: one kernel for all groups.

The grid runs over blocks of rows of one group, tiles of outputs and, innermost, parts of K. The
group of a block is a prefetched scalar, by which Pallas streams the tiles of that group's matrix
from where it lies; what a grid step computes is that of `quantized_matmul`. Blocks without rows
name the tiles that are there already and compute nothing. The rows of blocks are gathered, and
brought back, by XLA.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.grouped_linear.blocks import block_size, blocks_of
from pallas_kernels.grouped_linear.layer import Layer
from pallas_kernels.quantized_matmul.formats import NIBBLES
from pallas_kernels.quantized_matmul.mosaic_tpu import Place, add_tile, call, plan_of
from pallas_kernels.quantized_matmul.operands import Operands

LEAST_ROWS, MOST_ROWS = 32, 256  # of a block: whole tiles of 8 bits; a matrix is read once a block


def _kernel(groups: Any, counts: Any, refs: Operands, out_ref: Any, sums_ref: Any) -> None:
    del groups
    count, step, steps = counts[pl.program_id(0)], pl.program_id(2), pl.num_programs(2)

    @pl.when(count > 0)
    def _() -> None:
        add_tile(refs, out_ref, sums_ref, step, steps)


@functools.partial(jax.jit, static_argnames="interpret")
def grouped_linear(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
    *,
    interpret: Any = None,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`."""
    operands = layer.operands(x)
    stored, scales, zeros = operands.stored, operands.scales, operands.zeros
    rows, groups, outputs = x.shape[0], len(stored), operands.outputs
    if scales is None:
        scales = jnp.ones((1, groups, outputs))
    # a row of 4 bits may end within a block of its inputs: the rest meets zeros
    inputs = stored.shape[2] * (NIBBLES if operands.is_int4 else 1)
    operand = operands.rows
    if operand.dtype == jnp.float16:  # which a TPU does not multiply
        operand = operand.astype(jnp.float32)
    operand = jnp.pad(operand, ((0, 0), (0, inputs - x.shape[1])))
    if operands.group:
        missing = ((0, inputs // operands.group - len(scales)), (0, 0), (0, 0))
        scales = jnp.pad(scales, missing)
        zeros = None if zeros is None else jnp.pad(zeros, missing)

    blocks = blocks_of(
        jnp.arange(rows, dtype=jnp.int32),
        sizes,
        block_size(rows, groups, LEAST_ROWS, MOST_ROWS),
    )
    row_scale = operands.row_scale
    gathered = Operands(
        rows=operand[blocks.rows],
        row_scale=None if row_scale is None else row_scale[blocks.rows, None],
        stored=stored,
        scales=scales,
        zeros=zeros,
    )
    plan = replace(plan_of(gathered, None), tile_m=blocks.size)
    count, tiles, steps = len(blocks.groups), outputs // plan.tile_n, inputs // plan.tile_k

    def blocks_at(block: Any, tile: Any, step: Any, groups: Any, counts: Any) -> Place:
        """Of a block without rows those that are there; the last stands for their results."""
        is_used = counts[block] > 0
        return Place(
            rows=jnp.where(is_used, block, 0),
            tile=jnp.where(is_used, tile, tiles - 1),
            step=jnp.where(is_used, step, steps - 1),
            result=jnp.where(is_used, block, count),
            matrix=groups[block],
        )

    # matrix by matrix
    zeros = None if zeros is None else zeros.swapaxes(0, 1)
    out = call(
        _kernel,
        gathered._replace(scales=scales.swapaxes(0, 1), zeros=zeros),
        plan,
        blocks_at,
        grid=(count, tiles, steps),
        semantics=("parallel", "arbitrary", "arbitrary"),
        rows=(count + 1) * blocks.size,
        out_dtype=layer.out_dtype,
        table=(blocks.groups, blocks.counts),
        interpret=interpret,
        name="grouped_linear",
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

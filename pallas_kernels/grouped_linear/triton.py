"""Grouped linear layers for NVIDIA GPUs, by Pallas' Triton backend: one launch for all groups.

A program owns one block of rows and one tile of outputs, and reads its group's matrix where it
lies. Blocks are the grid's fastest axis: blocks of one group stand side by side, so what one of
them reads of the matrix the next finds in the cache.
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

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear.blocks import Blocks, blocks_of
from pallas_kernels.grouped_linear.layer import Layer
from pallas_kernels.quantized_matmul.activations import Rows
from pallas_kernels.quantized_matmul.formats import BLOCK
from pallas_kernels.quantized_matmul.operands import Operands
from pallas_kernels.quantized_matmul.triton_tile import for_triton, tile_of, tile_sums

TILE_OUTPUTS = 64
STEP_BYTES = 128  # of a row of the weight
FEW_ROWS = 32  # of a block, whose tiles leave shared memory for a stage more


@dataclass(frozen=True, slots=True)
class _Plan:
    """The static facts of the kernel.

    Attributes:
        size: places of a block.
        tile: outputs of a program, of each of gate and up.
        sources: how many rows of the blocks read one row of x, side by side; None: x lies as the
            blocks do.
        scatters: whether results lie as rows do, not as the blocks do.
        gated: whether outputs 2 i and 2 i + 1 are gate and up.
        width: inputs of a step.
    """

    size: int
    tile: int
    sources: int | None
    scatters: bool
    gated: bool
    width: int


def _kernel(
    rows_ref: Any,  # int32[B, R]
    groups_ref: Any,  # int32[B]
    counts_ref: Any,  # int32[B]
    refs: Operands,  # of weights [E, N, K]
    out_ref: Any,  # [M or B * R, width]
    *,
    plan: _Plan,
) -> None:
    block, tile = pl.program_id(0), pl.program_id(1)
    count = counts_ref[block]

    @pl.when(count > 0)
    def _() -> None:
        counted = jnp.arange(plan.size) < count
        places = block * plan.size + jnp.arange(plan.size)
        rows = plt.load(rows_ref.at[block, jnp.arange(plan.size)], mask=counted, other=0)
        outputs = tile * plan.tile + jnp.arange(plan.tile)
        channels = (2 * outputs, 2 * outputs + 1) if plan.gated else (outputs,)
        sums = tile_sums(
            refs,
            plan.width,
            matrix=groups_ref[block],
            rows=places if plan.sources is None else lax.div(rows, jnp.int32(plan.sources)),
            counted=counted,
            channels=channels,
            steps=(0, -(-refs.rows.shape[1] // plan.width)),
        )
        out = sums[0]
        if plan.gated:
            # rounded where the layers of other backends round
            gate, up = (total.astype(out_ref.dtype).astype(jnp.float32) for total in sums)
            active = gate / (1.0 + jnp.exp(-gate))
            out = active.astype(out_ref.dtype).astype(jnp.float32) * up
        # an interpreter puts back what a mask leaves out: beyond the end it does no harm
        target = jnp.where(counted, rows if plan.scatters else places, out_ref.shape[0])
        view, mask = tile_of(out_ref, None, target, counted, outputs)
        plt.store(view, out.astype(out_ref.dtype), mask=mask)


def in_blocks(
    x: Rows,  # [M / sources, K], or [B * R, K] where sources is None
    blocks: Blocks,
    layer: Layer,
    *,
    sources: int | None,
    weights: jax.Array | None,  # float32[T, choices]
    interpret: Any,
) -> jax.Array:  # [B * R, N], half as wide when gated; float32[T, N] with weights
    """As `pallas_kernels.grouped_linear.linear_in_blocks`."""
    scattered = None if weights is None else weights.size
    out = _call(x, blocks, layer, sources=sources, scattered=scattered, interpret=interpret)
    if weights is None:
        return out
    parts = out.reshape(*weights.shape, -1).astype(jnp.float32)
    return (parts * weights[:, :, None]).sum(axis=1)


def _call(
    x: Rows,
    blocks: Blocks,
    layer: Layer,
    *,
    sources: int | None,
    scattered: int | None,
    interpret: Any,
) -> jax.Array:  # [B * R or scattered, N]
    """Results lie as the places do, or as so many rows."""
    operands, outputs = for_triton(layer.operands(x)), layer.width
    is_int4, element = operands.is_int4, operands.stored.dtype.itemsize
    plan = _Plan(
        size=blocks.size,
        tile=TILE_OUTPUTS,
        sources=sources,
        scatters=scattered is not None,
        gated=layer.gated,
        width=BLOCK if is_int4 else STEP_BYTES // element,
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(blocks.groups.shape[0], -(-outputs // plan.tile)),
        out_shape=result_like(
            operands.rows, (scattered or blocks.rows.size, outputs), layer.out_dtype
        ),
        compiler_params=plt.CompilerParams(
            num_warps=4, num_stages=4 if blocks.size <= FEW_ROWS else 3
        ),
        interpret=interpreter.is_used_by_triton(interpret),
        name="grouped_linear",
    )(*blocks, operands)


def grouped_linear(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
    *,
    interpret: Any = None,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`."""
    if layer.activations == "fp8":
        raise KernelError("activations", "'fp8'", "'float' or 'int8' with the triton backend")
    rows = x.shape[0]
    blocks = blocks_of(jnp.arange(rows, dtype=jnp.int32), sizes)
    out = _call(x, blocks, layer, sources=1, scattered=rows, interpret=interpret)
    return jnp.where(jnp.arange(rows)[:, None] < sizes.sum(), out, 0)

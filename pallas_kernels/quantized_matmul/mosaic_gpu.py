"""quantized_matmul for NVIDIA Hopper in Pallas Mosaic GPU.

The operands are swapped: out^T [N, M] = weight [N, K] @ x^T [K, M], so that output channels fill
the 64 rows that wgmma wants and a decode step of 8 rows of x is a tile of 8 columns. A thread block
owns 128 output channels, one tile of rows of x and one part of K. Its third warpgroup brings
stored weights and x by TMA into a ring of shared-memory stages; the first two each read 64 output
channels of stored weights into registers, convert them there to the type of x and multiply them
from registers, so a converted weight never touches memory. With both operands in 8 bits
(activations="int8" or "fp8") wgmma reads both from shared memory.

A last stage of 4-bit weights may reach past the end of a row: x is padded with zeros there, like
the packed weights, and scales of the last groups are read where they are.

Scales wait for the sums. Where a row has several every group has its own wgmma sum, which is
scaled and added to the total, so 4-bit weights enter the product as exact small integers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import interpreter
from pallas_kernels.backends.mosaic_gpu import HopperMatmulTuning
from pallas_kernels.compat import load_row, result_like, transposed
from pallas_kernels.hopper.tiles import row_tiles
from pallas_kernels.quantized_matmul.formats import PIECE
from pallas_kernels.quantized_matmul.mosaic_gpu_plan import (
    CHANNELS,
    CONSUMERS,
    ROW_MULTIPLE,
    TILE_CHANNELS,
    Plan,
    plan_of,
    require_fit,
)
from pallas_kernels.quantized_matmul.nibbles import NIBBLE_UNIT, centred_nibbles
from pallas_kernels.quantized_matmul.operands import Operands

ROW = plgpu.Layout.WGMMA.reduce(1)  # one number an output channel
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one number a row of x


def _kernel(
    refs: Operands,  # x [M, K] of whole stages
    out_gmem: Any,  # [splits, M, N]
    x_smem: Any,  # [stages, tile_rows, width]
    weight_smem: Any,  # stored[stages, 128, STORED_BYTES / itemsize]
    scales_smem: Any,  # [stages, groups, 128]
    zeros_smem: Any,  # uint8[stages, groups, 128]
    staging_smem: Any,  # [CONSUMERS, 64, width or piece]
    out_smem: Any,  # [CONSUMERS, tile_rows, 64]
    full: Any,
    empty: Any,
    *,
    plan: Plan,
) -> None:
    split, row_tile, channel_tile, warpgroup = (
        lax.axis_index(name) for name in ("split", "rows", "channels", "warpgroup")
    )
    # a last tile that would reach past the end starts earlier: its overlap is computed twice; of
    # rows that are not there, where x has fewer than a tile, TMA gives zeros and writes none
    row = jnp.minimum(row_tile * plan.tile_rows, max(refs.rows.shape[0] - plan.tile_rows, 0))
    channel = jnp.minimum(channel_tile * TILE_CHANNELS, refs.outputs - TILE_CHANNELS)
    share = -(-plan.steps // plan.splits)
    begin = split * share
    steps = jnp.minimum(share, plan.steps - begin)
    tile = (CHANNELS, plan.tile_rows)

    def spread(vector: jax.Array, axis: int) -> jax.Array:
        return lax.broadcast_in_dim(vector, tile, [axis])

    def first_group(step: jax.Array) -> jax.Array:
        """The first group of the scales in a stage: of the last ones where fewer are left."""
        wanted = (begin + step) * plan.groups
        return jnp.minimum(wanted, refs.scales.shape[0] - plan.groups) if plan.ragged else wanted

    def place_of(step: jax.Array, group: int) -> Any:
        """The place in a stage of the scales of one of its groups; of one past the end, any."""
        if not plan.ragged:
            return group
        skipped = (begin + step) * plan.groups - first_group(step)
        return jnp.minimum(skipped + group, plan.groups - 1)

    def produce() -> None:
        if plan.registers:
            plgpu.set_max_registers(plan.registers.producer, action="decrease")

        def fetch(step: jax.Array, carry: None) -> None:
            stage = lax.rem(step, jnp.int32(plan.stages))

            @pl.when(step >= plan.stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[stage])

            def bring(array: Any, place: tuple[Any, Any], held: Any) -> None:
                plgpu.copy_gmem_to_smem(array.at[place], held.at[stage], full.at[stage])

            channels, at = pl.ds(channel, TILE_CHANNELS), begin + step
            bring(refs.stored, (channels, pl.ds(at * plan.columns, plan.columns)), weight_smem)
            x_place = pl.ds(row, plan.tile_rows), pl.ds(at * plan.width, plan.width)
            bring(refs.rows, x_place, x_smem)
            if plan.groups:
                place = pl.ds(first_group(step), plan.groups), channels
                bring(refs.scales, place, scales_smem)
                if refs.zeros is not None:
                    bring(refs.zeros, place, zeros_smem)
            return carry

        lax.fori_loop(0, steps, fetch, None)

    def consume() -> None:
        if plan.registers:
            plgpu.set_max_registers(plan.registers.consumer, action="increase")
        own = pl.ds(warpgroup * CHANNELS, CHANNELS)
        channels = pl.ds(channel + warpgroup * CHANNELS, CHANNELS)

        def zero_of(stage: jax.Array, place: Any) -> jax.Array | None:
            if refs.zeros is None:
                return None
            held = zeros_smem.at[stage, place, own] if plan.groups else refs.zeros.at[0, channels]
            return load_row(held, ROW).astype(jnp.float32)

        def converted(stage: jax.Array, held: jax.Array, nibble: int, place: Any) -> jax.Array:
            """A piece of the stored weights [64, columns] in the type of x, zero at its group's."""
            if plan.stored == jnp.uint16:
                zero = zero_of(stage, place)
                return centred_nibbles(held, nibble, zero, plan.operand, plan.staged)
            if plan.stored != jnp.int8:
                # the hardware converts float8 to float16 only
                held = held.astype(jnp.float16)
                if plan.operand != jnp.float16:
                    held = held.astype(jnp.float32)
            return held.astype(plan.operand)

        def add(acc: Any, stage: jax.Array, held: Any, group: int, place: Any) -> None:
            """Adds the product of a stage, or of one of its groups, of which `held` is loaded."""
            if not plan.converts:
                plgpu.wgmma(acc, weight_smem.at[stage, own], transposed(x_smem.at[stage]))
                return
            size = plan.group or plan.width
            nibbles = range(group * size // PIECE, -(-(group + 1) * size // PIECE))
            for nibble in nibbles if plan.pieces > 1 else range(1):
                weights, first = converted(stage, held, nibble, place), nibble * PIECE
                if size < PIECE:
                    inside = group * size - first
                    weights, first = weights[:, inside : inside + size], group * size
                interpreter.multiply(
                    acc,
                    weights,
                    transposed(x_smem.at[stage, :, pl.ds(first, weights.shape[1])]),
                    lambda: staging_smem.at[warpgroup],
                    interpreted=plan.staged,
                )

        accumulator = plgpu.ACC(tile, plan.accumulator)

        def step_of(acc: Any, step: jax.Array, total: Any) -> Any:
            """Adds a stage to the sum of all steps, or the sum of each group to the total."""
            stage = lax.rem(step, jnp.int32(plan.stages))
            plgpu.barrier_wait(full.at[stage])
            held = weight_smem[stage, own] if plan.converts else None
            if not plan.groups:
                add(acc, stage, held, 0, 0)
                plgpu.wgmma_wait(0)
            for group in range(plan.groups):
                place = place_of(step, group)

                def summed(acc: Any, group: int = group, place: Any = place) -> jax.Array:
                    add(acc, stage, held, group, place)
                    return acc[...]

                scale = load_row(scales_smem.at[stage, place, own], ROW).astype(jnp.float32)
                total = total + pl.run_scoped(summed, accumulator) * spread(scale, 0)
            # only what the producer waits for
            pl.when(step + plan.stages < steps)(lambda: plgpu.barrier_arrive(empty.at[stage]))
            return total

        def whole(acc: Any) -> jax.Array:
            lax.fori_loop(0, steps, functools.partial(step_of, acc), None)
            return acc[...]

        if plan.groups:
            zero = plgpu.layout_cast(jnp.full(tile, 0.0, jnp.float32), plgpu.Layout.WGMMA)
            out = lax.fori_loop(0, steps, functools.partial(step_of, None), zero)
        else:
            out = pl.run_scoped(whole, accumulator)
        out = out.astype(jnp.float32)
        if plan.stored == jnp.uint16:
            out = out * NIBBLE_UNIT[jnp.dtype(plan.operand)]
        if not plan.groups:
            scale = load_row(refs.scales.at[0, channels], ROW).astype(jnp.float32)
            out = out * spread(scale, 0)
        rows = pl.ds(row, plan.tile_rows)
        if refs.row_scale is not None:
            out = out * spread(load_row(refs.row_scale.at[rows], COLUMN), 1)
        transposed(out_smem.at[warpgroup])[...] = plgpu.layout_cast(
            out.astype(out_gmem.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_gmem.at[split, rows, channels])
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup == CONSUMERS, produce, consume)


def matmul(
    operands: Operands, *, out_dtype: DTypeLike, tuning: HopperMatmulTuning | None, interpret: Any
) -> jax.Array:  # [S, M, N]
    """Parts of x @ weight.T on an NVIDIA Hopper GPU; the shapes are those that its record takes.

    Args:
        operands: x is bfloat16 or float16, or rounded.
        out_dtype: type of a product that is one part.
        tuning: tile_m, stages and splits; None chooses them from the shapes.
        interpret: parameters of JAX's Mosaic GPU interpreter; None compiles for the GPU.
    """
    rows, inputs = operands.rows.shape
    plan = plan_of(operands, tuning, staged=interpreter.is_used(interpret))
    part_type = jnp.dtype(out_dtype if plan.splits == 1 else jnp.float32)
    if tuning is not None:
        require_fit(plan, tuning, part_type)
    # of fewer rows than a tile of shared memory has TMA takes those that are there
    takes_few = rows < ROW_MULTIPLE and not plan.staged
    padding = 0 if takes_few else max(plan.tile_rows - rows, -rows % ROW_MULTIPLE)
    operand = jnp.pad(operands.rows, ((0, padding), (0, plan.steps * plan.width - inputs)))
    row_scale = operands.row_scale
    if row_scale is not None:
        lacking = max(rows + padding, plan.tile_rows) - len(row_scale)
        row_scale = jnp.pad(row_scale, (0, max(lacking, 0)))
    copies = 2 + (plan.groups > 0) * (1 + (operands.zeros is not None))
    out = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=result_like(operand, (plan.splits, rows + padding, operands.outputs), part_type),
        scratch_types=[
            *(
                plgpu.SMEM(shape, kind, transforms=row_tiles(columns, kind) if columns else ())
                for shape, kind, columns in plan.buffers(part_type)
            ),
            plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages),
        ],
        grid=(plan.splits, -(-rows // plan.tile_rows), -(-operands.outputs // TILE_CHANNELS)),
        grid_names=("split", "rows", "channels"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="quantized_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(operands._replace(rows=operand, row_scale=row_scale))
    return out[:, :rows]

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
from pallas_kernels.quantized_matmul.activations import Rows, split_rows
from pallas_kernels.quantized_matmul.formats import (
    PIECE,
    Int4Weight,
    QuantizedWeight,
    group_scales,
    outputs_of,
)
from pallas_kernels.quantized_matmul.mosaic_gpu_plan import (
    CHANNELS,
    CONSUMERS,
    ROW_MULTIPLE,
    STORED_BYTES,
    TILE_CHANNELS,
    Plan,
    plan_of,
    require_fit,
)
from pallas_kernels.quantized_matmul.nibbles import NIBBLE_UNIT, centred_nibbles

ROW = plgpu.Layout.WGMMA.reduce(1)  # one number an output channel
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one number a row of x


def _spread(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [axis])


def _kernel(
    x_gmem: Any,  # [M, K], K whole stages
    weight_gmem: Any,  # stored[N, K or K / 4]
    scales_gmem: Any,  # float32[groups, N]
    zeros_gmem: Any,  # uint8[groups, N], or float32[1] when there are none
    row_scale_gmem: Any,  # float32[M or more], or float32[1] when x is not quantised
    out_gmem: Any,  # [splits, M, N]
    x_smem: Any,  # [stages, tile_rows, width]
    weight_smem: Any,  # stored[stages, 128, STORED_BYTES / itemsize]
    scales_smem: Any,  # float32[stages, groups, 128]
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
    row = jnp.minimum(row_tile * plan.tile_rows, max(x_gmem.shape[0] - plan.tile_rows, 0))
    channel = jnp.minimum(channel_tile * TILE_CHANNELS, weight_gmem.shape[0] - TILE_CHANNELS)
    share = -(-plan.steps // plan.splits)
    begin = split * share
    steps = jnp.minimum(share, plan.steps - begin)
    columns = weight_smem.shape[2]
    has_zeros = len(zeros_gmem.shape) == 2

    def first_group(step: jax.Array) -> jax.Array:
        """The first group of the scales in a stage: of the last ones where fewer are left."""
        wanted = (begin + step) * plan.groups
        return jnp.minimum(wanted, scales_gmem.shape[0] - plan.groups) if plan.ragged else wanted

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

            channels = pl.ds(channel, TILE_CHANNELS)
            ready = full.at[stage]
            plgpu.copy_gmem_to_smem(
                weight_gmem.at[channels, pl.ds((begin + step) * columns, columns)],
                weight_smem.at[stage],
                ready,
            )
            plgpu.copy_gmem_to_smem(
                x_gmem.at[
                    pl.ds(row, plan.tile_rows), pl.ds((begin + step) * plan.width, plan.width)
                ],
                x_smem.at[stage],
                ready,
            )
            if plan.groups:
                groups = pl.ds(first_group(step), plan.groups)
                plgpu.copy_gmem_to_smem(
                    scales_gmem.at[groups, channels], scales_smem.at[stage], ready
                )
                if has_zeros:
                    plgpu.copy_gmem_to_smem(
                        zeros_gmem.at[groups, channels], zeros_smem.at[stage], ready
                    )
            return carry

        lax.fori_loop(0, steps, fetch, None)

    def consume() -> None:
        if plan.registers:
            plgpu.set_max_registers(plan.registers.consumer, action="increase")
        own = pl.ds(warpgroup * CHANNELS, CHANNELS)
        channels = pl.ds(channel + warpgroup * CHANNELS, CHANNELS)

        def zero_of(stage: jax.Array, place: Any) -> jax.Array | None:
            if not has_zeros:
                return None
            held = zeros_smem.at[stage, place, own] if plan.groups else zeros_gmem.at[0, channels]
            return load_row(held, ROW).astype(jnp.float32)

        def converted(stage: jax.Array, held: jax.Array, nibble: int, place: Any = 0) -> jax.Array:
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

        def multiply(acc: Any, weights: jax.Array, stage: jax.Array, first: int) -> None:
            inputs = weights.shape[1]
            rows = transposed(x_smem.at[stage, :, pl.ds(first, inputs)])
            interpreter.multiply(
                acc,
                weights,
                rows,
                lambda: staging_smem.at[warpgroup],
                interpreted=plan.staged,
            )

        def release(step: jax.Array, stage: jax.Array) -> None:
            # only what the producer waits for
            pl.when(step + plan.stages < steps)(lambda: plgpu.barrier_arrive(empty.at[stage]))

        tile = (CHANNELS, plan.tile_rows)
        accumulator = plgpu.ACC(tile, plan.accumulator)

        def whole(acc: Any) -> jax.Array:
            """One scale a row: one sum for all steps."""

            def step_of(step: jax.Array, carry: None) -> None:
                stage = lax.rem(step, jnp.int32(plan.stages))
                plgpu.barrier_wait(full.at[stage])
                if plan.converts:
                    held = weight_smem[stage, own]
                    for nibble in range(plan.pieces):
                        multiply(acc, converted(stage, held, nibble), stage, nibble * PIECE)
                else:
                    plgpu.wgmma(acc, weight_smem.at[stage, own], transposed(x_smem.at[stage]))
                plgpu.wgmma_wait(0)
                release(step, stage)
                return carry

            lax.fori_loop(0, steps, step_of, None)
            return acc[...]

        def by_groups() -> jax.Array:
            """A sum for every group, scaled and added to the total."""
            assert plan.group is not None
            size = plan.group

            def step_of(step: jax.Array, total: jax.Array) -> jax.Array:
                stage = lax.rem(step, jnp.int32(plan.stages))
                plgpu.barrier_wait(full.at[stage])
                held: Any = weight_smem[stage, own] if plan.converts else None
                for group in range(plan.groups):
                    nibbles = range(group * size // PIECE, -(-(group + 1) * size // PIECE))
                    nibbles = nibbles if plan.pieces > 1 else range(1)
                    place = place_of(step, group)

                    def summed(
                        acc: Any, nibbles: range = nibbles, group: int = group, place: Any = place
                    ) -> jax.Array:
                        if not plan.converts:
                            plgpu.wgmma(
                                acc, weight_smem.at[stage, own], transposed(x_smem.at[stage])
                            )
                            return acc[...]
                        for nibble in nibbles:
                            weights, first = converted(stage, held, nibble, place), nibble * PIECE
                            if size < PIECE:
                                inside = group * size - first
                                weights = weights[:, inside : inside + size]
                                first += inside
                            multiply(acc, weights, stage, first)
                        return acc[...]

                    scale = load_row(scales_smem.at[stage, place, own], ROW)
                    total = total + pl.run_scoped(summed, accumulator) * _spread(scale, tile, 0)
                release(step, stage)
                return total

            zero = plgpu.layout_cast(jnp.full(tile, 0.0, jnp.float32), plgpu.Layout.WGMMA)
            return lax.fori_loop(0, steps, step_of, zero)

        out = by_groups() if plan.groups else pl.run_scoped(whole, accumulator)
        out = out.astype(jnp.float32)
        if plan.stored == jnp.uint16:
            out = out * NIBBLE_UNIT[jnp.dtype(plan.operand)]
        if not plan.groups:
            scale = load_row(scales_gmem.at[0, channels], ROW)
            out = out * _spread(scale, tile, 0)
        if not plan.converts:
            rows = pl.ds(row, plan.tile_rows)
            scale = load_row(row_scale_gmem.at[rows], COLUMN)
            out = out * _spread(scale, tile, 1)
        transposed(out_smem.at[warpgroup])[...] = plgpu.layout_cast(
            out.astype(out_gmem.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            out_smem.at[warpgroup],
            out_gmem.at[split, pl.ds(row, plan.tile_rows), channels],
        )
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup == CONSUMERS, produce, consume)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning", "interpret"))
def matmul(
    x: Rows,  # [M, K]
    weight: QuantizedWeight,  # [N, K]
    *,
    out_dtype: DTypeLike,
    tuning: HopperMatmulTuning | None = None,
    interpret: Any = None,
) -> jax.Array:  # [S, M, N]
    """Parts of x @ weight.T on an NVIDIA Hopper GPU; the shapes are those that its record takes.

    Args:
        x: bfloat16 or float16, or rounded.
        weight: the quantised weight.
        out_dtype: type of a product that is one part.
        tuning: tile_m, stages and splits; None chooses them from the shapes.
        interpret: parameters of JAX's Mosaic GPU interpreter; None compiles for the GPU.
    """
    operand, row_scale = split_rows(x)
    rows, inputs = operand.shape
    plan = plan_of(operand, weight, tuning, staged=interpreter.is_used(interpret))
    # of fewer rows than a tile of shared memory has TMA takes those that are there
    takes_few = rows < ROW_MULTIPLE and not plan.staged
    padding = 0 if takes_few else max(plan.tile_rows - rows, -rows % ROW_MULTIPLE)
    operand = jnp.pad(operand, ((0, padding), (0, plan.steps * plan.width - inputs)))
    lacking = max(rows + padding, plan.tile_rows) - (0 if row_scale is None else len(row_scale))
    if row_scale is None:
        row_scale = jnp.zeros((1,))
    elif lacking > 0:
        row_scale = jnp.pad(row_scale, (0, lacking))
    outputs = outputs_of(weight)
    scales, zeros = group_scales(weight)
    if zeros is None:
        zeros = jnp.zeros((1,), jnp.float32)
    part_type = jnp.dtype(out_dtype if plan.splits == 1 else jnp.float32)
    if tuning is not None:
        require_fit(plan, tuning, part_type.itemsize)
    columns = STORED_BYTES // plan.stored.itemsize
    staging = min(plan.group or PIECE, PIECE) if isinstance(weight, Int4Weight) else plan.width
    out = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=result_like(operand, (plan.splits, rows + padding, outputs), part_type),
        scratch_types=[
            plgpu.SMEM(
                (plan.stages, plan.tile_rows, plan.width),
                plan.operand,
                transforms=row_tiles(min(plan.group or plan.width, plan.width), plan.operand),
            ),
            plgpu.SMEM(
                (plan.stages, TILE_CHANNELS, columns),
                plan.stored,
                transforms=row_tiles(columns, plan.stored),
            ),
            plgpu.SMEM((plan.stages, max(plan.groups, 1), TILE_CHANNELS), jnp.float32),
            plgpu.SMEM((plan.stages, max(plan.groups, 1), TILE_CHANNELS), jnp.uint8),
            plgpu.SMEM(
                (CONSUMERS, CHANNELS, staging) if plan.staged else (CONSUMERS, 8, 64),
                plan.operand,
                transforms=row_tiles(staging if plan.staged else 64, plan.operand),
            ),
            plgpu.SMEM(
                (CONSUMERS, plan.tile_rows, CHANNELS),
                part_type,
                transforms=row_tiles(CHANNELS, part_type),
            ),
            plgpu.Barrier(
                num_arrivals=2 + (plan.groups > 0) * (1 + (zeros.ndim == 2)),
                num_barriers=plan.stages,
            ),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages),
        ],
        grid=(plan.splits, -(-rows // plan.tile_rows), -(-outputs // TILE_CHANNELS)),
        grid_names=("split", "rows", "channels"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="quantized_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(operand, weight[0], scales, zeros, row_scale)
    return out[:, :rows]

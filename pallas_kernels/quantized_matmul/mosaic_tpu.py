"""quantized_matmul for TPUs in Pallas Mosaic.

The grid runs over blocks of output channels and, innermost, over blocks of K. Pallas streams the
stored weights of the next grid step into VMEM while this one multiplies. Weights are converted in
VMEM, x stays in its own type, and sums are kept in a float32 scratch block until K is done.
Scales apply to the sums, where output channels lie along lanes as they do in the stored scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from pallas_kernels.quantized_matmul.formats import BLOCK, NIBBLES, PIECE, SYMMETRIC_ZERO
from pallas_kernels.quantized_matmul.operands import Operands, product

LANES = 128
ROW_MULTIPLE = 32  # sublanes of a tile of 8-bit elements; enough for every type of x
TILE_ROWS = 256
TILE_CHANNELS = 256
MAX_WIDTH = 2048  # inputs of a grid step


class Place(NamedTuple):
    """Which blocks a grid step reads, and which it writes, along each axis of the product.

    Attributes:
        rows: of x.
        tile: of output channels.
        step: of inputs.
        result: of rows of the result.
        matrix: index of a weight of several.
        only: of what is not divided.
    """

    rows: Any
    tile: Any
    step: Any
    result: Any
    matrix: Any = None
    only: int = 0


def _four_bits(refs: Operands) -> Any:
    """float32[rows, channels] of a tile: the part of the sums that this step adds."""
    words, group = refs.stored[...].astype(jnp.int32), refs.group
    total = jnp.zeros((refs.rows.shape[0], refs.outputs), jnp.float32)
    for first in range(0, refs.rows.shape[1], LANES):
        block, nibble = divmod(first, BLOCK)
        held = words[:, block * PIECE : (block + 1) * PIECE]
        nibble //= PIECE
        halves = [(held >> (4 * (nibble + i))) & 15 for i in range(LANES // PIECE)]
        values = jnp.concatenate(halves, axis=1)  # [channels, 128]
        if refs.zeros is None:
            values = values - SYMMETRIC_ZERO
        weights = values.astype(jnp.float32).astype(refs.rows.dtype)
        x = refs.rows[:, first : first + LANES]
        size = min(group or LANES, LANES)
        for inside in range(0, LANES, size):
            member = x
            if size < LANES:
                lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
                member = jnp.where((lane >= inside) & (lane < inside + size), x, jnp.zeros_like(x))
            part = product(member, weights, jnp.float32)
            place = pl.ds((first + inside) // group if group else 0, 1)
            if refs.zeros is not None:
                sums = member.astype(jnp.float32).sum(axis=1, keepdims=True)
                part = part - sums * refs.zeros[place, :].astype(jnp.int32).astype(jnp.float32)
            if group:
                part = part * refs.scales[place, :]
            total = total + part
    return total


def _kernel(refs: Operands, out_ref: Any, sums_ref: Any) -> None:
    add_tile(refs, out_ref, sums_ref, pl.program_id(2), pl.num_programs(2))


def add_tile(refs: Operands, out_ref: Any, sums_ref: Any, step: Any, steps: Any) -> None:
    """A grid step: one of so many steps over K; with the last one the result is written.

    Args:
        refs: rows [R, width], their scales float32[R, 1], and a weight's elements [C, width], or
            uint16[C, width / 4], with the scales [groups of the step or 1, C] and zeros.
        out_ref, sums_ref: [R, C].
        step, steps: which of how many.
    """

    @pl.when(step == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    if refs.is_int4:
        sums_ref[...] += _four_bits(refs)
    else:
        x, weights = refs.rows[...], refs.stored[...]
        if x.dtype != jnp.int8:
            weights = weights.astype(jnp.float32).astype(x.dtype)
        sums_ref[...] += product(x, weights, sums_ref.dtype)

    @pl.when(step == steps - 1)
    def _() -> None:
        total = sums_ref[...].astype(jnp.float32)
        if refs.group is None:
            total = total * refs.scales[...]
        if refs.row_scale is not None:
            total = total * refs.row_scale[...]
        out_ref[...] = total.astype(out_ref.dtype)


def plan_of(operands: Operands, tuning: TpuMatmulTuning | None) -> TpuMatmulTuning:
    """The sizes of a product's tiles: by its shape where none are given, and cut to it."""
    rows, inputs = operands.rows.shape
    wanted = tuning or TpuMatmulTuning(TILE_ROWS, TILE_CHANNELS, MAX_WIDTH)
    for name, unit in {"tile_m": ROW_MULTIPLE, "tile_n": LANES}.items():
        if getattr(wanted, name) % unit:
            raise KernelError(f"tuning.{name}", getattr(wanted, name), f"a multiple of {unit}")
    # scales are tiles of 8 sublanes
    unit = max(2 * BLOCK if operands.is_int4 else LANES, 8 * (operands.group or 0))
    most = max(min(wanted.tile_k, MAX_WIDTH), unit)
    widths = [width for width in range(unit, most + 1, unit) if inputs % width == 0]
    return TpuMatmulTuning(
        tile_m=min(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, wanted.tile_m),
        tile_n=wanted.tile_n if operands.outputs % wanted.tile_n == 0 else LANES,
        tile_k=max(widths, default=inputs),  # a whole row always is a legal block
    )


def call(
    kernel: Callable[..., None],
    operands: Operands,
    plan: TpuMatmulTuning,
    place: Callable[..., Place],
    *,
    grid: tuple[int, int, int],
    semantics: tuple[Any, ...],
    rows: int,
    out_dtype: DTypeLike,
    table: tuple[jax.Array, ...] = (),
    interpret: Any,
    name: str,
) -> jax.Array:  # [rows, N]
    """Calls a kernel of `add_tile` over a grid.

    Args:
        kernel: takes references to the table, to tiles of the operands, of the result and of sums.
        operands: rows of whole tiles with their scales float32[M, 1], and a weight, or several
            whose scales and zeros are by matrix, [E, groups, N].
        plan: sizes of the tiles.
        place: the blocks of a grid step, given its indices and references to the table.
        grid, semantics: sizes of the grid's axes, and how each may be divided.
        rows: of the result.
        table: scalars that are there before the grid begins.
    """
    # in tiles of 8 sublanes
    operands = operands._replace(scales=operands.scales.astype(jnp.float32))
    if operands.zeros is not None:
        operands = operands._replace(zeros=operands.zeros.astype(jnp.int32))
    inputs, groups = operands.rows.shape[1], operands.scales.shape[-2]
    stored_width = plan.tile_k // NIBBLES if operands.is_int4 else plan.tile_k
    vector: Any = ((1, plan.tile_n), "only", "tile")
    if groups > 1:
        vector = ((groups * plan.tile_k // inputs, plan.tile_n), "step", "tile")

    def tiles(array: Any, shape: tuple[int, int], *axes: str) -> Any:
        """Of an array's last two axes, by the names of a place's blocks along them."""
        if array is None:
            return None
        names = axes if array.ndim == 2 else ("matrix", *axes)
        return pl.BlockSpec(
            shape if array.ndim == 2 else (None, *shape),
            lambda *step: tuple(getattr(place(*step), name) for name in names),
        )

    result = result_like(operands.rows, (rows, operands.outputs), out_dtype)
    specs = Operands(
        rows=tiles(operands.rows, (plan.tile_m, plan.tile_k), "rows", "step"),
        row_scale=tiles(operands.row_scale, (plan.tile_m, 1), "rows", "only"),
        stored=tiles(operands.stored, (plan.tile_n, stored_width), "tile", "step"),
        scales=tiles(operands.scales, *vector),
        zeros=tiles(operands.zeros, *vector),
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=grid,
            in_specs=[specs],
            out_specs=tiles(result, (plan.tile_m, plan.tile_n), "result", "tile"),
            scratch_shapes=[pltpu.VMEM((plan.tile_m, plan.tile_n), operands.sum_type)],
        ),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=interpreter.of_call(interpret),
        name=name,
    )(*table, operands)


def matmul(
    operands: Operands, *, out_dtype: DTypeLike, tuning: TpuMatmulTuning | None, interpret: Any
) -> jax.Array:  # [1, M, N]
    """x @ weight.T on a TPU as one part; the shapes are those that its record takes.

    Args:
        operands: x is float32 or bfloat16; or integers of 8 bits.
        out_dtype: type of the result.
        tuning: tile_m (a multiple of 32), tile_n (of 128) and tile_k; None chooses.
        interpret: True or pltpu.InterpretParams runs the kernel without a TPU; None compiles.
    """
    rows, inputs = operands.rows.shape
    plan = plan_of(operands, tuning)
    padding, row_scale = -rows % plan.tile_m, operands.row_scale
    if row_scale is not None:
        row_scale = jnp.pad(row_scale[:rows], (0, padding))[:, None]
    padded = jnp.pad(operands.rows, ((0, padding), (0, 0)))
    out = call(
        _kernel,
        operands._replace(rows=padded, row_scale=row_scale),
        plan,
        lambda n, m, k: Place(rows=m, tile=n, step=k, result=m),
        grid=(operands.outputs // plan.tile_n, len(padded) // plan.tile_m, inputs // plan.tile_k),
        semantics=("parallel", "parallel", "arbitrary"),
        rows=len(padded),
        out_dtype=out_dtype,
        interpret=interpret,
        name="quantized_matmul",
    )
    return out[None, :rows]

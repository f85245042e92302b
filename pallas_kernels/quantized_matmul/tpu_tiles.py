"""The tiles of a product on a TPU: which blocks a grid step reads, and what it adds to the sums.

Weights are converted in VMEM, x stays in its own type, and sums are kept in a float32 scratch block
until K is done. Scales apply to the sums, where output channels lie along lanes as they do in the
stored scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_tpu import TpuMatmulTuning
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.formats import BLOCK, NIBBLES, PIECE, SYMMETRIC_ZERO
from pallas_kernels.quantized_matmul.operands import Operands, product

LANES = 128
ROW_MULTIPLE = 32  # sublanes of a tile of 8-bit elements; enough for every type of x
TILE_ROWS = 256
TILE_CHANNELS = 256
MAX_WIDTH = 2048  # inputs of a grid step
ROWS_BYTES = 8 << 20  # of the chip's own memory for rows that are there as a whole
PARTS = 2  # of the outputs, where their tiles divide: a v5p has two cores


class Place(NamedTuple):
    """Which blocks a grid step reads along each axis of the product.

    Attributes:
        rows: of x.
        tile: of output channels.
        step: of inputs.
        matrix: index of a weight of several.
        only: of what is not divided.
    """

    rows: Any
    tile: Any
    step: Any
    matrix: Any = None
    only: int = 0


def _four_bits(refs: Operands) -> Any:
    """float32[rows, channels] of a tile: the part of the sums that this step adds."""
    words, group = refs.stored[...].astype(jnp.int32), refs.group
    scales = refs.scales[...].astype(jnp.float32)
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
            place = (first + inside) // group if group else 0
            if refs.zeros is not None:
                sums = member.astype(jnp.float32).sum(axis=1, keepdims=True)
                part = part - sums * refs.zeros[pl.ds(place, 1), :].astype(jnp.float32)
            if group:
                part = part * scales[place : place + 1]
            total = total + part
    return total


def add_tile(
    refs: Operands, sums_ref: Any, step: Any, steps: Any, write: Callable[[jax.Array], None]
) -> None:
    """A grid step: one of so many steps over K.

    Args:
        refs: rows [R, width], their scales float32[R, 1], and a weight's elements [C, width], or
            uint16[C, width / 4], with the scales [groups of the step or 1, C], if any, and zeros.
        sums_ref: [R, C].
        step, steps: which of how many.
        write: with the last step it is given the result, float32[R, C].
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
        if refs.scales is not None and refs.group is None:
            total = total * refs.scales[...].astype(jnp.float32)
        if refs.row_scale is not None:
            total = total * refs.row_scale[...]
        write(total)


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


def in_tiles(
    operands: Operands, plan: TpuMatmulTuning, place: Callable[..., Place]
) -> tuple[Operands, Operands]:
    """The operands as a kernel of `add_tile` takes them, and their block specifications.

    Args:
        operands: rows of whole tiles with their scales, and a weight, or several.
        plan: sizes of the tiles.
        place: the blocks of a grid step, given its indices and references to prefetched scalars.

    Returns:
        Rows, with scales float32[M, 1]; elements; scales and zeros in tiles of 8 sublanes. And the
        specifications of these.
    """
    group, scales, zeros = operands.group, operands.scales, operands.zeros
    if scales is not None and scales.dtype == jnp.float16:  # which a TPU does not read
        scales = scales.astype(jnp.float32)
    column = None if operands.row_scale is None else operands.row_scale[:, None]
    given = operands._replace(
        row_scale=column, scales=scales, zeros=None if zeros is None else zeros.astype(jnp.int32)
    )
    stored_width = plan.tile_k // NIBBLES if operands.is_int4 else plan.tile_k
    groups = 1 if group is None else plan.tile_k // group
    if plan.tile_k == operands.rows.shape[1]:  # whole rows, with what they are filled up with
        stored_width = operands.stored.shape[-1]
        groups = 1 if scales is None else scales.shape[-2]
    vector: Any = ((groups, plan.tile_n), "only" if group is None else "step", "tile")

    def tiles(array: Any, shape: tuple[int, int], *axes: str) -> Any:
        """Of an array's last two axes, by the names of a place's blocks along them."""
        if array is None:
            return None
        names = axes if array.ndim == 2 else ("matrix", *axes)
        return pl.BlockSpec(
            shape if array.ndim == 2 else (None, *shape),
            lambda *step: tuple(getattr(place(*step), name) for name in names),
        )

    specs = Operands(
        rows=tiles(given.rows, (plan.tile_m, plan.tile_k), "rows", "step"),
        row_scale=tiles(given.row_scale, (plan.tile_m, 1), "rows", "only"),
        stored=tiles(given.stored, (plan.tile_n, stored_width), "tile", "step"),
        scales=tiles(given.scales, *vector),
        zeros=tiles(given.zeros, *vector),
    )
    return given, specs


def holds_rows(
    operands: Operands,
    plan: TpuMatmulTuning,
    *,
    prepared: bool,
    beside: int = 0,
    most: int | None = None,
) -> bool:
    """Whether all inputs of a block of rows fit the chip's memory, also as the kernel makes them
    where they are `prepared`, beside so many bytes of other arrays; `most`: bytes for both."""
    rows, inputs = operands.rows.shape
    size = operands.rows.dtype.itemsize
    held = min(rows, plan.tile_m) * inputs * size * (3 if prepared else 2)
    return held + beside <= (ROWS_BYTES if most is None else most)

"""The static choices of the Mosaic GPU kernel: tiles, stages and parts of K."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from pallas_kernels.backends.mosaic_gpu import HopperMatmulTuning
from pallas_kernels.errors import KernelError
from pallas_kernels.hopper.registers import RegisterSplit
from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.quantized_matmul.formats import BLOCK, NIBBLES, PIECE
from pallas_kernels.quantized_matmul.operands import Operands
from pallas_kernels.quantized_matmul.splits import Tiling, number_of_splits

CHANNELS = 64  # output channels of a warpgroup: the rows of wgmma
CONSUMERS = 2
TILE_CHANNELS = CONSUMERS * CHANNELS
STORED_BYTES = 128  # of a row and stage: the width of the widest swizzle
ROW_MULTIPLE = 8  # wgmma's second dimension
WGMMA_ROWS = 256  # and its most
MAX_TILE_ROWS = 128
INT4_TILE_ROWS = 112  # two stages of 256 inputs and a float32 result fit the shared memory
# by group: sums of small groups are many, and more columns of them would not fit the registers
SMALL_GROUP_TILE_ROWS = {64: 64, 32: 48}
BLOCK_BYTES = 227 * 1024  # shared memory of a thread block
BUFFER_BYTES = 1024  # buffers in it are multiples of
SHARED_BYTES = 220 * 1024  # for stages and the result; the rest is for scales and barriers


@dataclass(frozen=True, slots=True)
class Plan:
    """The static facts of the kernel.

    Attributes:
        tile_rows: rows of x a thread block multiplies.
        stages: depth of the ring.
        splits: parts of K.
        steps: stages that all of K takes.
        width: inputs of a stage.
        group: inputs that share a scale; None when one scale serves a row.
        stored: type of the elements that the weight is stored in.
        scale: type of its scales.
        operand: type that is multiplied.
        accumulator: type of the sums.
        ragged: whether the last stage reaches past the last group.
        staged: pass converted weights through shared memory, as the interpreter demands.
    """

    tile_rows: int
    stages: int
    splits: int
    steps: int
    width: int
    group: int | None
    stored: Any
    scale: Any
    operand: Any
    accumulator: Any
    ragged: bool
    staged: bool

    @property
    def groups(self) -> int:
        """Groups of a stage; 0 when one scale serves a row."""
        return 0 if self.group is None else self.width // self.group

    @property
    def pieces(self) -> int:
        """Parts in which a stage's weights are converted."""
        return NIBBLES if self.stored == jnp.uint16 else 1

    @property
    def registers(self) -> RegisterSplit | None:
        """The split where sums of a group and the total would fill a consumer's registers."""
        few = self.tile_rows <= 16
        return None if few or not self.groups else RegisterSplit(CONSUMERS, 232, 40)

    @property
    def converts(self) -> bool:
        """Whether weights are converted before they are multiplied."""
        return self.stored != self.operand

    @property
    def columns(self) -> int:
        """Stored elements of a row and stage."""
        return STORED_BYTES // self.stored.itemsize

    def buffers(self, result: Any) -> tuple[tuple[tuple[int, ...], Any, int | None], ...]:
        """Shared memory for a type of the result: shapes, types and, of what is in tiles, columns.

        Stages of x, of stored weights, of scales and of zeros; what the interpreter multiplies; and
        the result.
        """
        scales = (self.stages, max(self.groups, 1), TILE_CHANNELS)
        staging = 64
        if self.staged:
            staging = min(self.group or PIECE, PIECE) if self.pieces > 1 else self.width
        return (
            (
                (self.stages, self.tile_rows, self.width),
                self.operand,
                min(self.group or self.width, self.width),
            ),
            ((self.stages, TILE_CHANNELS, self.columns), self.stored, self.columns),
            (scales, self.scale, None),
            (scales, jnp.uint8, None),
            ((CONSUMERS, CHANNELS if self.staged else 8, staging), self.operand, staging),
            ((CONSUMERS, self.tile_rows, CHANNELS), result, CHANNELS),
        )

    def fits(self, result: Any) -> bool:
        """Whether a GPU runs it with results of a type: registers left aside."""
        barriers = 2 * 8 * self.stages
        sizes = [
            math.prod(shape) * jnp.dtype(kind).itemsize
            for shape, kind, _ in replace(self, staged=False).buffers(result)
        ]
        total = sum(-(-size // BUFFER_BYTES) * BUFFER_BYTES for size in sizes) + barriers
        return self.tile_rows <= WGMMA_ROWS and total <= BLOCK_BYTES


def plan_of(operands: Operands, tuning: HopperMatmulTuning | None, staged: bool) -> Plan:
    """The choices for x [M, K], rounded to 8 bits or not, and a weight [N, K]."""
    rows, inputs = operands.rows.shape
    group, operand = operands.group, jnp.dtype(operands.rows.dtype)
    width = BLOCK if operands.is_int4 else STORED_BYTES
    default = INT4_TILE_ROWS if operands.is_int4 or group else MAX_TILE_ROWS
    default = SMALL_GROUP_TILE_ROWS.get(group or inputs, default)
    # tiles of one size, as small as their number allows
    row_tiles = -(-rows // (tuning.tile_m if tuning else default))
    tile_rows = -(-rows // (row_tiles * ROW_MULTIPLE)) * ROW_MULTIPLE
    stage_bytes = TILE_CHANNELS * STORED_BYTES + tile_rows * width * operand.itemsize
    # a scale and a zero of one byte; one group where one scale serves a row
    scale = jnp.dtype(operands.scales.dtype)
    stage_bytes += -(-width // (group or inputs)) * TILE_CHANNELS * (scale.itemsize + 1)
    # half of the memory for few rows: a second block on the same multiprocessor hides latency
    result_bytes = tile_rows * TILE_CHANNELS * 4
    budget = SHARED_BYTES // (2 if tile_rows <= 16 else 1) - result_bytes
    stages = tuning.stages if tuning else max(2, min(6, budget // stage_bytes))
    tiling = Tiling.of(
        (row_tiles * tile_rows, operands.outputs, inputs),
        (tile_rows, TILE_CHANNELS, width),
        TILE_CHANNELS * STORED_BYTES,
        operand.itemsize,
    )
    splits = tuning.splits if tuning else None
    return Plan(
        tile_rows=tile_rows,
        stages=stages,
        splits=splits or number_of_splits(tiling, multiprocessors()),
        steps=tiling.steps,
        width=width,
        group=group,
        stored=jnp.dtype(operands.stored.dtype),
        scale=scale,
        operand=operand,
        accumulator=operands.sum_type,
        ragged=inputs % width != 0,
        staged=staged,
    )


def require_fit(plan: Plan, tuning: HopperMatmulTuning, result: Any) -> None:
    """Refuses a tuning with tiles or stages too large for these operands and type of the result.

    Raises:
        KernelError: names the field that is to be smaller, and what it may be.
    """
    if plan.fits(result):
        return
    one = replace(plan, stages=1)
    if not one.fits(result):
        rows = range(ROW_MULTIPLE, WGMMA_ROWS + 1, ROW_MULTIPLE)
        most = max(r for r in rows if replace(one, tile_rows=r).fits(result))
        raise KernelError("tuning.tile_m", tuning.tile_m, f"at most {most} for these operands")
    most = next(n for n in itertools.count(1) if not replace(plan, stages=n + 1).fits(result))
    raise KernelError(
        "tuning.stages", plan.stages, f"at most {most} with tiles of {plan.tile_rows} rows"
    )

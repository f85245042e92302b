"""The static choices of the Mosaic GPU kernel: tiles, stages and parts of K."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends.mosaic_gpu import HopperMatmulTuning
from pallas_kernels.errors import KernelError
from pallas_kernels.hopper.registers import RegisterSplit
from pallas_kernels.multiprocessors import multiprocessors
from pallas_kernels.quantized_matmul.formats import (
    BLOCK,
    NIBBLES,
    Int4Weight,
    QuantizedWeight,
    group_of,
    outputs_of,
)
from pallas_kernels.quantized_matmul.splits import Tiling, number_of_splits, step_bytes

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
        return (
            RegisterSplit(CONSUMERS, 232, 40) if self.groups > 0 and self.tile_rows > 16 else None
        )

    @property
    def converts(self) -> bool:
        """Whether weights are converted before they are multiplied."""
        return self.stored != self.operand

    def fits(self, result_bytes: int) -> bool:
        """Whether a GPU runs it with result elements of so many bytes: registers left aside."""
        scales = self.stages * max(self.groups, 1) * TILE_CHANNELS
        buffers = (
            self.stages * self.tile_rows * self.width * self.operand.itemsize,
            self.stages * TILE_CHANNELS * STORED_BYTES,
            scales * 4,
            scales,  # zeros
            TILE_CHANNELS * ROW_MULTIPLE * self.operand.itemsize,  # for the interpreter
            TILE_CHANNELS * self.tile_rows * result_bytes,
        )
        barriers = 2 * 8 * self.stages
        total = sum(-(-size // BUFFER_BYTES) * BUFFER_BYTES for size in buffers) + barriers
        return self.tile_rows <= WGMMA_ROWS and total <= BLOCK_BYTES


def plan_of(
    x: jax.Array,
    weight: QuantizedWeight,
    tuning: HopperMatmulTuning | None,
    staged: bool,
) -> Plan:
    """The choices for x [M, K], rounded to 8 bits or not, and a weight [N, K]."""
    rows, inputs = x.shape
    is_int4 = isinstance(weight, Int4Weight)
    group = group_of(weight, inputs)
    stored = jnp.dtype(weight[0].dtype)
    operand = jnp.dtype(x.dtype)
    width = BLOCK if is_int4 else STORED_BYTES
    default = INT4_TILE_ROWS if is_int4 or group < inputs else MAX_TILE_ROWS
    default = SMALL_GROUP_TILE_ROWS.get(group, default)
    # tiles of one size, as small as their number allows
    row_tiles = -(-rows // (tuning.tile_m if tuning else default))
    tile_rows = -(-rows // (row_tiles * ROW_MULTIPLE)) * ROW_MULTIPLE
    stage_bytes = TILE_CHANNELS * STORED_BYTES + tile_rows * width * operand.itemsize
    # a float32 scale and a zero of one byte; one group where one scale serves a row
    stage_bytes += -(-width // group) * TILE_CHANNELS * 5
    # half of the memory for few rows: a second block on the same multiprocessor hides latency
    result_bytes = tile_rows * TILE_CHANNELS * 4
    budget = SHARED_BYTES // (2 if tile_rows <= 16 else 1) - result_bytes
    stages = tuning.stages if tuning else max(2, min(6, budget // stage_bytes))
    steps = -(-inputs // width)
    outputs = outputs_of(weight)
    tiling = Tiling(
        rows=row_tiles * tile_rows,
        outputs=outputs,
        tiles=row_tiles * -(-outputs // TILE_CHANNELS),
        steps=steps,
        step_bytes=step_bytes(
            tile_rows, TILE_CHANNELS, width, TILE_CHANNELS * STORED_BYTES, operand.itemsize
        ),
    )
    splits = tuning.splits if tuning else None
    return Plan(
        tile_rows=tile_rows,
        stages=stages,
        splits=splits or number_of_splits(tiling, multiprocessors()),
        steps=steps,
        width=width,
        group=group if group < inputs else None,
        stored=stored,
        operand=operand,
        accumulator=jnp.int32 if operand == jnp.int8 else jnp.float32,
        ragged=inputs % width != 0,
        staged=staged,
    )


def require_fit(plan: Plan, tuning: HopperMatmulTuning, result_bytes: int) -> None:
    """Refuses a tuning with tiles or stages too large for these operands.

    Raises:
        KernelError: names the field that is to be smaller, and what it may be.
    """
    if plan.fits(result_bytes):
        return
    one = replace(plan, stages=1)
    if not one.fits(result_bytes):
        rows = range(ROW_MULTIPLE, WGMMA_ROWS + 1, ROW_MULTIPLE)
        most = max(r for r in rows if replace(one, tile_rows=r).fits(result_bytes))
        raise KernelError("tuning.tile_m", tuning.tile_m, f"at most {most} for these operands")
    most = 1
    while replace(plan, stages=most + 1).fits(result_bytes):
        most += 1
    raise KernelError(
        "tuning.stages", plan.stages, f"at most {most} with tiles of {plan.tile_rows} rows"
    )

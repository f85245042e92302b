"""Grouped linear layers for TPUs in Pallas Mosaic: one kernel for all groups.

The grid runs over parts of the outputs (which two cores share), blocks of rows of one group, tiles
of outputs and, innermost, parts of K. The group of a block is a prefetched scalar, by which Pallas
streams the tiles of that group's matrix from where it lies; what a grid step computes is that of
`quantized_matmul`. Blocks without rows name the tiles that are there already and compute nothing.

Few rows stay in the chip's memory as a whole: the kernel takes those of a block from them, and adds
what it has computed to the rows of the result, by the table in scalar memory. Of many rows XLA
gathers those of the blocks, and brings the results back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.grouped_linear.blocks import TPU_SIZES, Blocks, blocks_of
from pallas_kernels.grouped_linear.layer import Layer
from pallas_kernels.quantized_matmul.activations import RoundedRows, Rows
from pallas_kernels.quantized_matmul.formats import NIBBLES
from pallas_kernels.quantized_matmul.mosaic_tpu import (
    Around,
    Form,
    by_rows,
    gate_of,
    prepare,
    rounded,
)
from pallas_kernels.quantized_matmul.operands import Operands
from pallas_kernels.quantized_matmul.tpu_tiles import (
    LANES,
    PARTS,
    Place,
    add_tile,
    holds_rows,
    in_tiles,
    plan_of,
)

# of the chip's own memory, for rows and likewise for results that are there as a whole: 256 tokens
# of Mixtral's
HELD_BYTES = 16 << 20
VMEM_BYTES = 48 << 20  # that the kernel may have; a v5p has 64 MiB, a v5e and a v6e have 128


@dataclass(frozen=True, slots=True)
class _Form:
    """The static facts of the kernel.

    Attributes:
        sources: rows of the blocks that read one row of x, of which the kernel gathers those of a
            block; None: x lies as the places of the blocks do.
        gated: whether outputs 2 i and 2 i + 1 are gate and up, and the kernel gates.
        choices: rows whose results are added for a row of the result; None: results lie as the
            places do.
        dtype: in which results are rounded.
        rounds: whether the kernel rounds rows to 8-bit integers, each with a scale of its own.
        width: inputs of a grid step.
    """

    sources: int | None
    gated: bool
    choices: int | None
    dtype: Any
    rounds: bool
    width: int


def _kernel(groups: Any, counts: Any, *given: Any, form: _Form) -> None:
    del groups
    operands = list(given)
    has_rows = form.sources is not None or form.choices is not None
    rows: Any = operands.pop(0) if has_rows else None
    weights: Any = None if form.choices is None else operands.pop(0)  # float32[choices, T]
    refs, out_ref, sums_ref, *scratch = operands
    held = scratch[2:4]  # of rounded rows: all scales and those of a block, where it gathers
    block, tile, step, steps = (*(pl.program_id(axis) for axis in (1, 2, 3)), pl.num_programs(3))
    count = counts[block]

    def widen(at: Any) -> None:
        """Rows as float32, since single ones can be read of 32 bits alone."""
        values = refs.rows[at, :].astype(jnp.float32)
        if form.rounds:
            integers, held[0][at, :] = rounded(values)
            values = integers.astype(jnp.float32)
        elif refs.row_scale is not None:
            held[0][at, :] = refs.row_scale[at, :]
        scratch[0][at, :] = values

    @pl.when((block == 0) & (tile == 0) & (step == 0))
    def _() -> None:
        if form.sources is not None:
            by_rows(refs.rows.shape[0], widen)
        if form.choices is not None:
            out_ref[...] = jnp.zeros_like(out_ref)

    def gather(place: Any, _: None) -> None:
        source = lax.div(rows[block, place], jnp.int32(form.sources))
        scratch[1][pl.ds(place, 1), :] = scratch[0][pl.ds(source, 1), :]
        if sums_ref.dtype == jnp.int32:
            held[1][pl.ds(place, 1), :] = held[0][pl.ds(source, 1), :]

    def write(total: jax.Array) -> None:
        value = gate_of(total.astype(form.dtype)) if form.gated else total
        if form.choices is None:
            out_ref[...] = value.astype(out_ref.dtype)
            return
        results = scratch[-1]
        results[...] = value.astype(jnp.float32)
        width = value.shape[1]
        columns = pl.ds(pl.multiple_of(tile * width, LANES), width)

        def add(place: Any, _: None) -> None:
            row = rows[block, place]
            token, choice = (one(row, jnp.int32(form.choices)) for one in (lax.div, lax.rem))
            at = pl.ds(token, 1), columns
            out_ref[at] = out_ref[at] + weights[choice, token] * results[pl.ds(place, 1), :]

        lax.fori_loop(0, count, add, None)

    @pl.when(count > 0)
    def _() -> None:
        own, rows = refs, refs.rows
        if form.sources is not None or form.rounds:

            @pl.when((tile == 0) & (step == 0))
            def _() -> None:
                if form.sources is not None:
                    lax.fori_loop(0, count, gather, None)
                else:
                    prepare(refs, Around(), (scratch[0], scratch[1]), Form(form.dtype, rounds=True))

        if form.sources is not None:
            rows = scratch[1]
            own = own._replace(row_scale=held[1] if sums_ref.dtype == jnp.int32 else None)
        elif form.rounds:
            rows = scratch[0]
            own = own._replace(row_scale=scratch[1])
        if rows.shape[1] != form.width:
            rows = rows[:, pl.ds(pl.multiple_of(step * form.width, LANES), form.width)]
        kind = jnp.int8 if sums_ref.dtype == jnp.int32 else refs.rows.dtype
        add_tile(own._replace(rows=rows[...].astype(kind)), sums_ref, step, steps, write)


def in_blocks(
    x: Rows,  # [M / sources, K], or [B * R or more, K] where sources is None
    blocks: Blocks,
    layer: Layer,
    *,
    sources: int | None,
    weights: jax.Array | None,  # float32[T, choices]
    interpret: Any,
) -> jax.Array:  # [B * R or more, N], half as wide when gated; float32[T, N] with weights
    """As `pallas_kernels.grouped_linear.linear_in_blocks`."""
    operands = _operands(x, layer, rounds=False)
    plan = replace(plan_of(operands, None), tile_m=blocks.size)
    outputs, inputs = operands.outputs, operands.rows.shape[1]
    tiles, steps, count = outputs // plan.tile_n, inputs // plan.tile_k, len(blocks.groups)
    parts = PARTS if tiles % PARTS == 0 else 1
    tiles //= parts
    width = plan.tile_n // 2 if layer.gated else plan.tile_n
    gated = layer.gated and width % LANES == 0

    length = operands.rows.shape[0]
    size = (2 * length * operands.rows.dtype.itemsize + 4 * (length + blocks.size)) * inputs
    if layer.rounds:
        size += 2 * 4 * LANES * length  # a scale a row takes a vector's lanes
    gathers = sources is not None and size <= HELD_BYTES
    rounds = layer.rounds and not isinstance(x, RoundedRows)
    added = 0 if weights is None else 8 * len(weights) * outputs // parts
    adds = weights is not None and added <= HELD_BYTES
    beside = added if adds else 0
    holds = sources is None and holds_rows(
        operands, plan, prepared=rounds, beside=beside, most=HELD_BYTES
    )
    if rounds and not (gathers or holds):
        operands, rounds = _operands(x, layer, rounds=True), False
    if sources is not None and not gathers:
        source = lax.div(blocks.rows.reshape(-1), jnp.int32(sources))
        scale = operands.row_scale
        operands = operands._replace(
            rows=operands.rows[source], row_scale=None if scale is None else scale[source]
        )
    form = _Form(
        sources=sources if gathers else None,
        gated=gated,
        choices=weights.shape[1] if adds and weights is not None else None,
        dtype=layer.out_dtype,
        rounds=rounds,
        width=plan.tile_k,
    )
    table: list[Any] = [blocks.groups, blocks.counts]
    table += [blocks.rows] if gathers or adds else []
    table += [weights.T] if adds and weights is not None else []

    def place(part: Any, block: Any, tile: Any, step: Any, *table: Any) -> Place:
        """Of a block without rows those that are there."""
        is_used = table[1][block] > 0
        return Place(
            rows=jnp.where(is_used, block, 0),
            tile=part * tiles + jnp.where(is_used, tile, tiles - 1),
            step=jnp.where(is_used, step, steps - 1),
            matrix=table[0][block],
        )

    def of_block(part: Any, block: Any, tile: Any, step: Any, *table: Any) -> tuple[Any, Any]:
        """A tile of the result; the last block stands for those without rows."""
        row = jnp.where(table[1][block] > 0, block, count)
        return row, place(part, block, tile, step, *table).tile

    given, specs = in_tiles(operands, plan, place)
    width = plan.tile_n // 2 if gated else plan.tile_n
    scratch = [pltpu.VMEM((blocks.size, plan.tile_n), jnp.int32 if rounds else operands.sum_type)]
    if gathers:
        whole = operands.rows.shape
        specs = specs._replace(rows=pl.BlockSpec(whole, lambda *_: (0, 0)))
        scratch += [pltpu.VMEM(rows, jnp.float32) for rows in (whole, (blocks.size, inputs))]
        if given.row_scale is not None:
            scales = pl.BlockSpec(given.row_scale.shape, lambda *_: (0, 0))
            specs = specs._replace(row_scale=scales)
        if layer.rounds:
            scratch += [pltpu.VMEM((rows, 1), jnp.float32) for rows in (length, blocks.size)]
    elif holds:

        def of_rows(*step: Any) -> tuple[Any, Any]:
            return place(*step).rows, 0

        specs = specs._replace(rows=pl.BlockSpec((blocks.size, inputs), of_rows))
        if rounds:
            scratch += [
                pltpu.VMEM((blocks.size, inputs), jnp.int8),
                pltpu.VMEM((blocks.size, 1), jnp.float32),
            ]
    if adds:
        assert weights is not None
        shape, dtype = (len(weights), parts * tiles * width), jnp.dtype(jnp.float32)
        result = pl.BlockSpec((len(weights), tiles * width), lambda part, *_: (0, part))
        scratch.append(pltpu.VMEM((blocks.size, width), jnp.float32))
    else:
        shape, dtype = ((count + 1) * blocks.size, parts * tiles * width), layer.out_dtype
        result = pl.BlockSpec((blocks.size, width), of_block)
    out = pl.pallas_call(
        functools.partial(_kernel, form=form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(table),
            grid=(parts, count, tiles, steps),
            in_specs=[specs],
            out_specs=result,
            scratch_shapes=scratch,
        ),
        out_shape=result_like(operands.rows, shape, dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=interpreter.of_call(interpret),
        name="grouped_linear",
    )(*table, given)
    if layer.gated and not gated:
        gate = out[:, ::2].astype(jnp.float32)
        out = (gate / (1.0 + jnp.exp(-gate))).astype(out.dtype) * out[:, 1::2]
    if weights is None or adds:
        return out
    each = _by_row(out, blocks, weights.size).reshape(*weights.shape, -1)
    return (each.astype(jnp.float32) * weights[:, :, None]).sum(axis=1)


def _operands(x: Rows, layer: Layer, *, rounds: bool) -> Operands:
    """What the kernel reads, in whole vectors of inputs; `rounds` as in `Layer.operands`."""
    operands = layer.operands(x, rounds=rounds)
    stored, scales, zeros = operands.stored, operands.scales, operands.zeros
    rows = operands.rows
    if rows.dtype == jnp.float16:  # which a TPU does not multiply
        rows = rows.astype(jnp.float32)
    operands = operands._replace(rows=rows)
    if rows.shape[1] % LANES == 0:
        return operands
    # a row of 4 bits may end within a vector of its inputs: the rest meets zeros
    inputs = stored.shape[2] * (NIBBLES if operands.is_int4 else 1)
    rows = jnp.pad(rows, ((0, 0), (0, inputs - rows.shape[1])))
    if operands.group:
        missing = ((0, 0), (0, inputs // operands.group - scales.shape[1]), (0, 0))
        scales = jnp.pad(scales, missing)
        zeros = None if zeros is None else jnp.pad(zeros, missing)
    return operands._replace(rows=rows, scales=scales, zeros=zeros)


def _by_row(out: jax.Array, blocks: Blocks, rows: int) -> jax.Array:  # [rows, N]
    """Results that lie as places do, in the order of the rows; of those in no block any."""
    counted = jnp.arange(blocks.size) < blocks.counts[:, None]
    row = jnp.where(counted, blocks.rows, rows).reshape(-1)
    places = jnp.zeros(rows, jnp.int32).at[row].set(jnp.arange(row.size), mode="drop")
    return out[places]


@functools.partial(jax.jit, static_argnames="interpret")
def grouped_linear(
    x: jax.Array,  # [M, K]
    sizes: jax.Array,  # int32[E]
    layer: Layer,
    *,
    interpret: Any = None,
) -> jax.Array:  # [M, N], or [M, N // 2] when gated
    """As `pallas_kernels.grouped_linear`."""
    rows = x.shape[0]
    blocks = blocks_of(jnp.arange(rows, dtype=jnp.int32), sizes, TPU_SIZES)
    out = in_blocks(x, blocks, layer, sources=1, weights=None, interpret=interpret)
    return jnp.where(jnp.arange(rows)[:, None] < sizes.sum(), _by_row(out, blocks, rows), 0)

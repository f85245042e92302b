"""quantized_matmul for TPUs in Pallas Mosaic, with what a linear layer does around its product.

The grid runs over parts of the output channels (which two cores share), blocks of rows, blocks of
channels and, innermost, blocks of K. Pallas streams the stored weights of the next grid step into
VMEM while this one multiplies (`tpu_tiles`).

Rows that fit are in VMEM as a whole: they come once, and the kernel norms and rounds them before
its first product. What follows the product is done to a block of sums when its K is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from pallas_kernels.quantized_matmul.activations import Rounding
from pallas_kernels.quantized_matmul.formats import NIBBLES
from pallas_kernels.quantized_matmul.operands import Operands
from pallas_kernels.quantized_matmul.tpu_tiles import (
    LANES,
    PARTS,
    ROW_MULTIPLE,
    Place,
    add_tile,
    holds_rows,
    in_tiles,
    plan_of,
)

INTEGERS = Rounding("int8")


class Around(NamedTuple):
    """What a layer does beside its product, each None where it does not; in a kernel references.

    Attributes:
        norm: [1, K], the weight of an RMS norm of the rows, in their type.
        bias: [1, N], added to the sums.
        residual: [M, N], or [M, N / 2] where gated: added to the result, of whose type it is.
    """

    norm: Any = None
    bias: Any = None
    residual: Any = None


@dataclass(frozen=True, slots=True)
class Form:
    """The static facts of a layer.

    Attributes:
        out_dtype: type of the result, in which each stage behind the product is rounded.
        eps, offset: of the norm, as in `pallas_kernels.linear.Norm`.
        rounds: whether rows are rounded to 8-bit integers, each with a scale of its own, behind the
            norm.
        gated: whether outputs 2 i and 2 i + 1 are gate and up, of which silu(gate) * up is left.
    """

    out_dtype: Any
    eps: float = 0.0
    offset: bool = False
    rounds: bool = False
    gated: bool = False


def rounded(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[R, K] as 8-bit integers with a scale float32[R, 1] of each row's own."""
    factor, scale = INTEGERS.stretch(jnp.abs(values).max(axis=1, keepdims=True))
    return INTEGERS.cut(values * factor), scale


def prepare(refs: Operands, around: Around, held: tuple[Any, ...], form: Form) -> None:
    """Norms and rounds the rows of a block: [R, K] into `held`, and their scales."""
    dtype = refs.rows.dtype

    def some(at: Any) -> None:
        values = refs.rows[at, :].astype(jnp.float32)
        if around.norm is not None:
            factor = around.norm[...].astype(jnp.float32)
            over = values * lax.rsqrt((values * values).mean(axis=1, keepdims=True) + form.eps)
            if form.offset:
                values = over * (1.0 + factor)
            else:
                values = over.astype(dtype).astype(jnp.float32) * factor
            values = values.astype(dtype).astype(jnp.float32)
        if not form.rounds:
            held[0][at, :] = values.astype(dtype)
            return
        held[0][at, :], held[1][at, :] = rounded(values)

    by_rows(refs.rows.shape[0], some)


def by_rows(rows: int, some: Callable[[Any], None]) -> None:
    """Calls `some` with slices of ROW_MULTIPLE rows in turn, the last of what is left: what it
    makes of a slice is beside the rows that the chip's memory holds, and so has to be small."""

    def body(index: Any, _: None) -> None:
        some(pl.ds(pl.multiple_of(index * ROW_MULTIPLE, ROW_MULTIPLE), ROW_MULTIPLE))

    whole, left = divmod(rows, ROW_MULTIPLE)
    if whole:
        lax.fori_loop(0, whole, body, None)
    if left:
        some(pl.ds(whole * ROW_MULTIPLE, left))


def _kernel(
    refs: Operands, around: Around, out_ref: Any, sums_ref: Any, *held: Any, form: Form
) -> None:
    tile, step, steps = pl.program_id(2), pl.program_id(3), pl.num_programs(3)

    def write(total: jax.Array) -> None:
        if around.bias is not None:
            total = total + around.bias[...].astype(jnp.float32)
        total = total.astype(form.out_dtype)
        value = gate_of(total) if form.gated else total.astype(jnp.float32)
        if around.residual is not None:
            value = value.astype(form.out_dtype).astype(jnp.float32)
            value = value + around.residual[...].astype(jnp.float32)
        out_ref[...] = value.astype(out_ref.dtype)

    if held:

        @pl.when((tile == 0) & (step == 0))
        def _() -> None:
            prepare(refs, around, held, form)

    own, width = refs, refs.stored.shape[1] * (NIBBLES if refs.is_int4 else 1)
    if held or refs.rows.shape[1] != width:
        whole = held[0] if held else refs.rows
        own = refs._replace(rows=whole[:, pl.ds(pl.multiple_of(step * width, LANES), width)])
    if form.rounds:
        own = own._replace(row_scale=held[1])
    add_tile(own, sums_ref, step, steps, write)


def gate_of(both: jax.Array) -> jax.Array:  # float32[R, N / 2]
    """silu(gate) * up of [R, N], whose columns are gate and up in turn.

    A product with ones and zeros copies columns exactly; each stage is rounded to the type.
    """
    wide, dtype = both.shape[1], both.dtype
    exact = dtype != jnp.bfloat16
    both = both.astype(jnp.float32) if exact else both
    column = lax.broadcasted_iota(jnp.int32, (wide, wide // 2), 0)
    result = lax.broadcasted_iota(jnp.int32, (wide, wide // 2), 1)
    gate, up = (
        jnp.dot(
            both,
            (column == 2 * result + part).astype(both.dtype),
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )
        for part in (0, 1)
    )
    return (gate / (1.0 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32) * up


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
    plan = plan_of(operands, tuning)
    return layer(operands, Around(), Form(out_dtype), plan, interpret=interpret)[None]


def layer(
    operands: Operands, around: Around, form: Form, plan: TpuMatmulTuning, *, interpret: Any = None
) -> jax.Array:  # [M, N], or [M, N / 2] when gated
    """A product with what stands around it, in one kernel.

    Args:
        operands: as for `matmul`; a norm and `form.rounds` want rows that the kernel holds.
        around, form: what stands around it; gated tiles have 256 channels.
        plan: sizes of the tiles, of `plan_of`.
        interpret: as for `matmul`.
    """
    rows, inputs = operands.rows.shape
    prepares = around.norm is not None or form.rounds
    holds = holds_rows(operands, plan, prepared=prepares)
    assert holds or not prepares
    size = min(rows, plan.tile_m)
    tiles, steps = operands.outputs // plan.tile_n, inputs // plan.tile_k
    parts = PARTS if tiles % PARTS == 0 else 1
    tiles //= parts
    width = plan.tile_n // 2 if form.gated else plan.tile_n

    def place(part: Any, block: Any, tile: Any, step: Any) -> Place:
        return Place(rows=block, tile=part * tiles + tile, step=step)

    given, specs = in_tiles(operands, replace(plan, tile_m=size), place)
    held: list[Any] = []
    if holds:
        specs = specs._replace(
            rows=pl.BlockSpec((size, inputs), lambda part, block, *_: (block, 0))
        )
    if prepares:
        kind = jnp.int8 if form.rounds else operands.rows.dtype
        held = [pltpu.VMEM((size, inputs), kind)]
        held += [pltpu.VMEM((size, 1), jnp.float32)] if form.rounds else []

    def of_tile(part: Any, block: Any, tile: Any, step: Any) -> tuple[Any, Any]:
        return block, part * tiles + tile

    def of_channels(part: Any, block: Any, tile: Any, step: Any) -> tuple[Any, Any]:
        return 0, part * tiles + tile

    result = pl.BlockSpec((size, width), of_tile)
    beside = Around(
        norm=around.norm if around.norm is None else pl.BlockSpec((1, inputs), lambda *_: (0, 0)),
        bias=around.bias if around.bias is None else pl.BlockSpec((1, plan.tile_n), of_channels),
        residual=around.residual if around.residual is None else result,
    )
    sums = jnp.int32 if form.rounds else operands.sum_type
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, form=form),
        grid=(parts, -(-rows // size), tiles, steps),
        in_specs=[specs, beside],
        out_specs=result,
        scratch_shapes=[pltpu.VMEM((size, plan.tile_n), sums), *held],
        out_shape=result_like(operands.rows, (rows, parts * tiles * width), form.out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary")
        ),
        interpret=interpreter.of_call(interpret),
        name="quantized_matmul",
    )(given, around)
    return out

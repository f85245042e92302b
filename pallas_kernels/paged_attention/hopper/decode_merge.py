"""The merge of the pieces of a cut row in Hopper decode, by the logarithms of their softmax sums.

The thread block that ends a row's last piece merges them all, in their order in the row, so which
block that is changes no bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import load_as, store_plain, transposed
from pallas_kernels.hopper.tiles import WGMMA_ROWS
from pallas_kernels.interpreter import pass_counter
from pallas_kernels.paged_attention.hopper.decode_plan import DecodePlan
from pallas_kernels.paged_attention.softmax import MASKED

# of a thread, for pieces that are read at the same time; attending 8-bit pages leaves few of 128
REGISTERS, REGISTERS_OF_8_BITS = 32, 8
AT_ONCE = 8  # most of them


class Row(NamedTuple):
    """A row's query heads of one group."""

    slot: jax.Array
    group: jax.Array
    pieces: jax.Array


class Partials(NamedTuple):
    """The memory of the pieces of cut rows, until the last of a row has ended.

    Attributes:
        out: float32[most_pieces, B, groups, channels, columns], each by itself a whole softmax's.
        lse: float32[most_pieces, B, groups, columns], log2 of the softmax's sum.
        ended: int32[B, groups], how many of a row have ended; zeros before the first.
    """

    out: Any
    lse: Any
    ended: Any

    def keep(
        self,
        out: jax.Array,  # float32[channels, columns]
        lse: jax.Array,  # float32[columns]
        number: jax.Array,
        row: Row,
        before: Any,
        *,
        interpreted: bool,
    ) -> None:
        """Writes a piece; `before`, int32[1] in shared memory, says how many of the row ended."""
        store_plain(self.out.at[number, row.slot, row.group], out)
        store_plain(self.lse.at[number, row.slot, row.group], lse)
        pass_counter(self.ended.at[row.slot, row.group], before, interpreted=interpreted)

    def merge(self, row: Row, staged: Any, plan: DecodePlan) -> None:
        """The pieces of a row, each with its share of the whole sum, to staged [columns, D]."""

        def some_channels(index: jax.Array, _: None) -> None:
            channels = pl.ds(index * WGMMA_ROWS, WGMMA_ROWS)
            stage(self._merged(row, channels, plan), staged.at[:, channels], plan)

        lax.fori_loop(0, plan.channels // WGMMA_ROWS, some_channels, None)

    def _merged(
        self, row: Row, channels: Any, plan: DecodePlan
    ) -> jax.Array:  # float32[WGMMA_ROWS, columns]
        shape = (WGMMA_ROWS, plan.columns)
        registers = REGISTERS_OF_8_BITS if plan.quantized else REGISTERS
        at_once = max(1, min(AT_ONCE, registers * 128 // (WGMMA_ROWS * plan.columns)))

        def filled(value: float) -> jax.Array:
            held = jnp.full((plan.columns,), value, jnp.float32)
            return plgpu.layout_cast(held, plgpu.Layout.WGMMA.reduce(0))

        def add(
            turn: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            out, highest, total = carry
            parts = []
            for offset in range(at_once):
                index = turn * at_once + offset
                # behind the last nothing was written
                place = (jnp.minimum(index, row.pieces - 1), row.slot, row.group)
                lse = load_as(self.lse.at[*place], plgpu.Layout.WGMMA.reduce(0))
                part = load_as(self.out.at[*place, channels], plgpu.Layout.WGMMA)
                parts.append((jnp.where(index < row.pieces, lse, 2 * MASKED), part))
            rising = functools.reduce(jnp.maximum, [lse for lse, _ in parts], highest)
            decay = jnp.exp2(highest - rising)
            out, total = out * lax.broadcast_in_dim(decay, shape, [1]), total * decay
            for lse, part in parts:
                weight = jnp.exp2(lse - rising)
                total = total + weight
                out = out + part * lax.broadcast_in_dim(weight, shape, [1])
            return out, rising, total

        out = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        turns = lax.div(row.pieces + (at_once - 1), jnp.int32(at_once))
        out, _, total = lax.fori_loop(0, turns, add, (out, filled(MASKED), filled(0.0)))
        return out / lax.broadcast_in_dim(total, shape, [1])


def stage(out: jax.Array, staged: Any, plan: DecodePlan) -> None:
    """Rounds out [some channels, columns] and turns it to staged [columns, some channels]."""
    turned = plgpu.layout_cast(out.astype(plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    store_plain(transposed(staged), turned)

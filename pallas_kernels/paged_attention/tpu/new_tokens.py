"""The tokens of a decode step in the kernel that attends to them and writes them into the pages.

The pages are read without the new tokens: they are attended from VMEM, so that nothing waits for
the write, and their places in a page that is read meanwhile are hidden like all that follows. The
write is one or two DMAs a token, from the operand in HBM into the page, begun when the slot's last
block has arrived and awaited at the end of the kernel: no DMA that reads a page runs beside one
that writes it, and no step of the grid waits for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.ring import Ring
from pallas_kernels.tpu_pages import Order


@dataclass(frozen=True)
class NewTokens:
    """The references of a core's new tokens.

    Attributes:
        ring: its jobs are slots, and its pool is written.
        lengths: int32[jobs] in scalar memory: tokens of each slot with the new ones; 0 = idle.
        counts: int32[jobs] likewise: how many of the Q tokens of each slot are new; None: the one.
        rows: VMEM [parts, Q, rows, D], keys and values of this step's slot.
        source: HBM [parts, jobs * Q, rows, D], those of all slots.
        written: a DMA semaphore.
        group: query heads a KV head.
    """

    ring: Ring
    lengths: Any
    counts: Any
    rows: Any
    source: Any
    written: Any
    group: int

    @property
    def number(self) -> int:
        """Q, the most new tokens of a slot."""
        return self.rows.shape[1]

    def position(self, step: Any, token: int) -> Any:
        """The place of a new token in the slot of this core's job at a step; below 0 for none."""
        job = self._job(step)
        if self.counts is None:
            return self.lengths[job] - 1
        count = self.counts[job]
        return jnp.where(token < count, self.lengths[job] - count + token, -1)

    def live(self, step: Any, token: int) -> Any:
        """Whether the slot of this core's job at a step has that new token."""
        if self.counts is None:
            return self.lengths[self._job(step)] > 0
        return self.position(step, token) >= 0

    def by_head(
        self, part: int, token: int, heads: int, dtype: Any, precision: lax.Precision
    ) -> jax.Array:  # float32[H, D]
        """The key (part 0) or value (part 1) of a new token that belongs to each query head."""
        pairs = self.ring.view.order is Order.PAIRS
        rows = self.rows[0 if pairs else part, token].astype(dtype)
        shape = (heads, rows.shape[0])
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        place = lax.broadcasted_iota(jnp.int32, shape, 1)
        own = row >= 0
        if pairs:
            own, place = place & 1 == part, place >> 1
        of_head, lanes = self.ring.view.head_rows, list[jax.Array]()
        for n in range(of_head):
            # the places of the n-th row of each head
            head = place // of_head
            nth = own & (place - head * of_head == n)
            nth &= (row >= head * self.group) & (row < (head + 1) * self.group)
            # a product with ones and zeros copies rows exactly
            lanes.append(
                jnp.dot(
                    nth.astype(dtype), rows, preferred_element_type=jnp.float32, precision=precision
                )
            )
        return lanes[0] if len(lanes) == 1 else jnp.concatenate(lanes, axis=1)

    def write(self, step: Any) -> None:
        """Starts the DMAs of this core's job at a step; with the last one all are awaited."""
        for token in range(self.number):

            @pl.when(self.live(step, token))
            def start(token: int = token) -> None:
                for copy in self._copies(step, token):
                    copy.start()

        @pl.when(step == self.ring.steps - 1)
        def finish() -> None:
            lax.fori_loop(0, self.ring.steps, self._wait, None)

    def _wait(self, step: Any, _: None) -> None:
        for token in range(self.number):

            @pl.when(self.live(step, token))
            def wait(token: int = token) -> None:
                for copy in self._copies(step, token):
                    copy.wait()

    def _job(self, step: Any) -> Any:
        return step * self.ring.cores + self.ring.core

    def _copies(self, step: Any, token: int) -> Iterator[Any]:
        ring, view = self.ring, self.ring.view
        job = self._job(step)
        row_of, _, _, _, table, first_page = ring.scalars
        position = self.position(step, token)
        place_of = job * self.number + token
        column = lax.div(position, view.page_size)
        page = table[row_of[job] * ring.columns + column] + first_page[0]
        offset = lax.rem(position, view.page_size)
        if view.order is Order.WHOLE_TILES:
            place = ring.pool.at[page, offset]
            yield pltpu.make_async_copy(self.source.at[:, place_of], place, self.written)
            return
        parts, count = view.token_parts
        for part in range(parts):
            first = pl.multiple_of((offset * parts + part) * count, count)
            place = ring.pool.at[page, pl.ds(first, count)]
            yield pltpu.make_async_copy(self.source.at[part, place_of], place, self.written)

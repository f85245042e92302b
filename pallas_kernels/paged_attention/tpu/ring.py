"""A ring of VMEM buffers through which a TPU kernel reads the pages of its jobs, block by block.

A job is a range of keys of one row of the page table: a slot of decode, or a tile of query rows of
prefill. The blocks of all jobs of a core form one sequence. While a block is attended, the DMAs of
the next `stages - 1` blocks of the sequence are on their way, across the ends of jobs, so that the
memory never waits for a job to end. Only pages that hold visible keys are read, one DMA a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends import mosaic_tpu
from pallas_kernels.coverage import refuse
from pallas_kernels.errors import KernelError
from pallas_kernels.tpu_pages import LANES, Order, PageView

# places of the ring's state in scalar memory
FETCH_STEP, FETCH_BLOCK, FETCHED, ATTENDED = range(4)
STATE_SIZE = 4
RING_BYTES = 8 << 20  # of the 16 MiB of VMEM that a kernel may use
SCALARS = 6  # scalar operands of a ring, in the order of `job_scalars`


def check(q: jax.Array, kv_pages: jax.Array, page_table: jax.Array, block_tokens: int) -> None:
    """Refuses what would not fit the scalar memory, and blocks that are not of whole lanes.

    Raises:
        KernelError: the page table or the tuning is refused.
    """
    refuse(mosaic_tpu.covers_table(page_table.shape), "mosaic_tpu", q, kv_pages)
    if block_tokens % LANES:
        raise KernelError("tuning.block_tokens", block_tokens, f"a multiple of {LANES}")


def job_scalars(
    row: jax.Array,  # int32[jobs], row of the page table
    low: jax.Array,  # int32[jobs], first visible key
    high: jax.Array,  # int32[jobs], end of the visible keys; 0 for a job without work
    page_table: jax.Array,  # int32[rows, P]
    first_page: jax.Array,  # int32[]
    cores: int,
) -> tuple[jax.Array, ...]:
    """The scalar operands of a ring; core c does the jobs c, c + cores, ... in turn."""
    jobs = -(-row.shape[0] // cores) * cores
    # one idle job a core at the end: what follows the last one may be asked for
    row, low, high = (
        jnp.pad(facts, (0, jobs + cores - facts.shape[0])) for facts in (row, low, high)
    )
    steps = jobs // cores
    step = jnp.arange(steps + 1, dtype=jnp.int32)[:, None]
    live = high.reshape(steps + 1, cores) > 0
    following = lax.cummin(jnp.where(live, step, steps), axis=0, reverse=True)
    return row, low, high, following.reshape(-1), page_table.reshape(-1), first_page.reshape(1)


def block_shape(
    view: PageView, itemsize: int, tokens: int, stages: int, ring_bytes: int = RING_BYTES
) -> tuple[int, int]:
    """Pages a block and stages, for the wanted ones and the VMEM that a ring may take."""
    token_bytes = 2 * view.kv_heads * view.head_dim * itemsize
    while tokens > LANES and tokens * token_bytes * stages > ring_bytes:
        tokens //= 2
    stages = max(2, min(stages, ring_bytes // (tokens * token_bytes)))
    return max(1, tokens // view.page_size), stages


@dataclass(frozen=True)
class Ring:
    """The references of a ring and its static shape.

    Attributes:
        scalars: references of `job_scalars` in scalar memory.
        pool: the pages in HBM, [NP, *view.page_shape].
        scales: float32[rows, blocks, ..] scales of the tokens in HBM, or None.
        held: VMEM [stages, pages, *view.page_shape].
        held_scales: VMEM float32[stages, ..], or None.
        arrived: a DMA semaphore a stage.
        state: int32[STATE_SIZE] in scalar memory, kept from job to job.
        view: how a page lies in memory.
        columns: pages in a row of the page table.
        core: index of this core.
        cores: number of cores.
        steps: jobs of each core.
    """

    scalars: tuple[Any, ...]
    pool: Any
    scales: Any
    held: Any
    held_scales: Any
    arrived: Any
    state: Any
    view: PageView
    columns: int
    core: Any
    cores: int
    steps: int

    @property
    def stages(self) -> int:
        return self.held.shape[0]

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.held.shape[1]

    @property
    def tokens(self) -> int:
        """Keys of a block."""
        return self.pages * self.view.page_size

    @property
    def may_be_nan(self) -> bool:
        """Whether invisible numbers can be NaN: their weight is 0, and 0 * NaN is NaN."""
        return bool(jnp.issubdtype(self.held.dtype, jnp.floating))

    def keys(self, step: Any) -> tuple[Any, Any]:
        """First and end of the visible keys of this core's job at a step."""
        _, low, high, *_ = self.scalars
        job = step * self.cores + self.core
        return low[job], high[job]

    def blocks(self, step: Any) -> tuple[Any, Any]:
        """First and end of the blocks of this core's job at a step."""
        low, high = self.keys(step)
        return lax.div(low, self.tokens), lax.div(high + (self.tokens - 1), self.tokens)

    def _following(self, step: Any) -> Any:
        """The first step from `step` on with a job that has work; `steps` when there is none."""
        return self.scalars[3][step * self.cores + self.core]

    def _live_pages(self, step: Any, block: Any) -> tuple[Any, Any]:
        low, high = self.keys(step)
        size = self.view.page_size
        first = jnp.maximum(lax.div(low, size), block * self.pages)
        return first, jnp.minimum(lax.div(high + (size - 1), size), (block + 1) * self.pages)

    def _page_copy(self, page: Any, stage: Any, place: Any) -> Any:
        return pltpu.make_async_copy(
            self.pool.at[page], self.held.at[stage, place], self.arrived.at[stage]
        )

    def _scales_copy(self, row: Any, block: Any, stage: Any) -> Any:
        return pltpu.make_async_copy(
            self.scales.at[row, block], self.held_scales.at[stage], self.arrived.at[stage]
        )

    def begin(self) -> None:
        """Starts the first DMAs of this core; called once, before its first job."""
        step = self._following(0)
        self.state[FETCH_STEP] = step
        self.state[FETCH_BLOCK] = self.blocks(step)[0]
        self.state[FETCHED] = 0
        self.state[ATTENDED] = 0
        if self.may_be_nan:
            lax.fori_loop(0, self.stages, self._clear_stage, None)
        for _ in range(self.stages - 1):
            self.fetch()

    def fetch(self) -> None:
        """Starts the DMAs of the next block of the sequence, if there is one."""
        row_of, _, _, _, table, first_page = self.scalars
        step, block = self.state[FETCH_STEP], self.state[FETCH_BLOCK]

        @pl.when(step < self.steps)
        def fetch_block() -> None:
            stage = lax.rem(self.state[FETCHED], self.stages)
            row = row_of[step * self.cores + self.core]

            def start(page: Any, _: None) -> None:
                number = table[row * self.columns + page] + first_page[0]
                self._page_copy(number, stage, page - block * self.pages).start()

            lax.fori_loop(*self._live_pages(step, block), start, None)
            if self.scales is not None:
                self._scales_copy(row, block, stage).start()
            ends = block + 1 >= self.blocks(step)[1]
            following = jnp.where(ends, self._following(step + 1), step)
            self.state[FETCH_STEP] = following
            self.state[FETCH_BLOCK] = jnp.where(ends, self.blocks(following)[0], block + 1)
            self.state[FETCHED] = self.state[FETCHED] + 1

    def arrive(self, step: Any, block: Any) -> Any:
        """Waits for the next block of the sequence, which is this one; its stage of the ring."""
        stage = lax.rem(self.state[ATTENDED], self.stages)
        self.state[ATTENDED] = self.state[ATTENDED] + 1
        first, end = self._live_pages(step, block)

        def wait(page: Any, _: None) -> None:
            self._page_copy(0, stage, page - block * self.pages).wait()

        lax.fori_loop(first, end, wait, None)
        if self.scales is not None:
            self._scales_copy(0, 0, stage).wait()
        if self.may_be_nan:
            self._clear_hidden(step, block, stage, first, end)
        return stage

    def _clear_stage(self, stage: Any, _: None) -> None:
        """Zeroes what no DMA has written yet: the values, and keys that share their matrix."""
        view = self.view

        def clear(page: Any, _: None) -> None:
            content = self.held.at[stage, page]
            if view.order is Order.WHOLE_TILES:
                shape = (view.page_size, view.kv_heads, view.head_dim)
                content[:, 1] = jnp.zeros(shape, self.held.dtype)
            else:
                content[...] = jnp.zeros(view.page_shape, self.held.dtype)

        lax.fori_loop(0, self.pages, clear, None)

    def _clear_hidden(self, step: Any, block: Any, stage: Any, first: Any, end: Any) -> None:
        """Zeroes what the block's outermost pages hold beside visible keys: it may be NaN."""
        low, high = self.keys(step)
        size = self.view.page_size

        @pl.when(first * size < low)
        def before() -> None:
            place = first - block * self.pages
            self._clear(stage, place, jnp.int32(0), low - first * size)

        @pl.when(end * size > high)
        def after() -> None:
            place = end - 1 - block * self.pages
            self._clear(stage, place, high - (end - 1) * size, jnp.int32(size))

    def _clear(self, stage: Any, place: Any, begin: Any, end: Any) -> None:
        """Zeroes the tokens begin .. end - 1 of a page: at least their values."""
        view = self.view
        page = self.held.at[stage, place]
        if view.order is Order.WHOLE_TILES:
            nothing = jnp.zeros((view.kv_heads, view.head_dim), self.held.dtype)

            def clear(token: Any, _: None) -> None:
                page[token, 1] = nothing

            lax.fori_loop(begin, end, clear, None)
            return
        # tokens share tiles here: the page is rewritten, in float32 for lack of narrower selects
        if view.order is Order.HEADS:
            shape: tuple[int, ...] = (2 * view.kv_heads, view.page_size, view.head_dim)
            axis, first, last = 1, begin, end
        else:
            shape, axis = view.page_shape, 0
            first, last = begin * 2 * view.kv_heads, end * 2 * view.kv_heads
        content = page[...].astype(jnp.float32).reshape(shape)
        place_of = lax.broadcasted_iota(jnp.int32, shape, axis)
        kept = jnp.where((place_of >= first) & (place_of < last), 0.0, content)
        page[...] = kept.reshape(view.page_shape).astype(self.held.dtype)

"""Programs beside the step: what changes on the device without computing a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.host_pages import MOST_LEAVING, MOVES, HostPages, pack_moves
from jaxserve.execution.layout import Layout, array, arrays
from jaxserve.execution.step_compiler import StepCompiler
from jaxserve.memory.tier import Landing
from jaxserve.models.kv_cache import KVCache
from jaxserve.scheduling.plan import Fork, StepPlan, Upload

UPLOAD_TOKENS = 4096  # of one call; more take several
FORKS = 8  # likewise


@arrays
class UploadInputs:
    """Entries of the token history and of the page table; unused ones name the trash slot."""

    token_slot: Any = array("T")
    position: Any = array("T")
    token: Any = array("T")
    page_slot: Any = array("P")
    page_index: Any = array("P")
    page: Any = array("P")


class UploadProgram:
    """Tokens and pages of a slot that another sequence has computed.

    Args:
        page_size: tokens a page.
        trash: slot of unused entries.
    """

    name = "upload"

    def __init__(self, page_size: int, trash: int):
        self._trash = trash
        self._num_tokens, self._num_pages = UPLOAD_TOKENS, -(-UPLOAD_TOKENS // page_size)
        self._layout = Layout(UploadInputs, {"T": self._num_tokens, "P": self._num_pages})
        self.size = self._layout.end

    def run(self, state: DeviceState, blob: jax.Array) -> DeviceState:
        """The device state with the entries written; traced."""
        given = self._layout.read(blob)
        return state._replace(
            page_table=state.page_table.at[given.page_slot, given.page_index].set(given.page),
            history=state.history.at[given.token_slot, given.position].set(given.token),
        )

    def pack(self, uploads: Sequence[Upload]) -> Iterator[np.ndarray]:
        """As many blobs as the uploads need, one at least; each is fresh memory."""
        tokens = _entries((u.slot, u.tokens) for u in uploads)
        pages = _entries((u.slot, np.array(u.pages, np.int32)) for u in uploads)
        while True:
            blob = np.zeros(self.size, np.int32)
            views = self._layout.views(blob)
            views.token_slot[:] = views.page_slot[:] = self._trash
            some, tokens = np.split(tokens, [self._num_tokens], axis=1)
            count = some.shape[1]
            views.token_slot[:count], views.position[:count], views.token[:count] = some
            some, pages = np.split(pages, [self._num_pages], axis=1)
            count = some.shape[1]
            views.page_slot[:count], views.page_index[:count], views.page[:count] = some
            yield blob
            if not tokens.shape[1] and not pages.shape[1]:
                return


@arrays
class CopyInputs:
    """Forks, see `jaxserve.scheduling.plan.Fork`; unused ones copy the trash to itself."""

    source: Any = array(FORKS)
    slot: Any = array(FORKS)
    num_tokens: Any = array(FORKS)
    source_page: Any = array(FORKS, "G")
    page: Any = array(FORKS, "G")


class CopyProgram:
    """History, page table and last pages of a slot into another slot.

    Args:
        num_layers: a page.
        trash: slot of unused entries.
        num_groups: of layers, each with a page for the same tokens.
    """

    name = "copy"

    def __init__(self, num_layers: int, trash: int, num_groups: int = 1):
        self._num_layers, self._trash, self._num_groups = num_layers, trash, num_groups
        self._layout = Layout(CopyInputs, {"G": num_groups})
        self.size = self._layout.end

    def run(self, state: DeviceState, blob: jax.Array) -> DeviceState:
        """The device state with the copies made; traced."""
        given: CopyInputs = self._layout.read(blob)
        full = given.num_tokens // state.kv.pages.shape[1] * self._num_groups
        table = _first_columns(state.page_table, given, full)
        last = full[:, None] + jnp.arange(self._num_groups)
        last = jnp.where(given.page > 0, last, table.shape[1])  # beyond the table: nowhere
        source, page = (
            state.kv.of_layers(self._num_layers, ids.reshape(-1))
            for ids in (given.source_page, given.page)
        )
        return state._replace(
            kv=state.kv.put(page, state.kv.take(source)),
            page_table=table.at[given.slot[:, None], last].set(given.page, mode="drop"),
            history=_first_columns(state.history, given, given.num_tokens),
            lengths=state.lengths.at[given.slot].set(given.num_tokens),
        )

    def pack(self, forks: Sequence[Fork]) -> Iterator[np.ndarray]:
        """Blobs for the forks in their order, one at least; those of a blob happen at once."""
        rest = list(forks)
        while True:
            some: list[Fork] = []
            slots: set[int] = set()  # that forks of this blob write to, and the pages
            pages: set[int] = set()
            while rest and len(some) < FORKS:
                fork = rest[0]
                if not slots.isdisjoint((fork.source, fork.slot)):
                    break
                if not pages.isdisjoint((*fork.source_pages, *fork.pages)):
                    break
                slots.add(fork.slot)
                pages.update(fork.pages)
                some.append(rest.pop(0))
            blob = np.zeros(self.size, np.int32)
            views = self._layout.views(blob)
            views.source[:] = views.slot[:] = self._trash
            for place, fork in enumerate(some):
                views.source[place], views.slot[place] = fork.source, fork.slot
                views.num_tokens[place] = fork.num_tokens
                if fork.pages:
                    views.source_page[place], views.page[place] = fork.source_pages, fork.pages
            yield blob
            if not rest:
                return


class Controls:
    """The programs beside the step of one engine.

    Args:
        cache: whose pages they change.
        max_num_seqs: slots.
        num_host_pages: see `CacheSettings`.

    Attributes:
        num_host_pages: in the host's memory; settled before `compiled`.
        landing: the tier that hears of pages that leave, if one does; settled before `compiled`.
        host_pages: those pages, once they are there; None: there are none.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, num_host_pages: int):
        self._num_layers = cache.groups.layers_per_page
        self._uploads = UploadProgram(cache.page_size, max_num_seqs)
        self._copies = CopyProgram(self._num_layers, max_num_seqs, cache.groups.pages.num_groups)
        self._programs = self._uploads, self._copies
        self.num_host_pages = num_host_pages
        self.landing: Landing | None = None
        self.host_pages: HostPages | None = None

    @property
    def moving_pages(self) -> int:
        """Pages whose copies, as they leave and come back, take a device's memory at once."""
        return MOST_LEAVING + 2 * MOVES if self.num_host_pages else 0

    def compiled(
        self, compiler: StepCompiler, shape: StateShape
    ) -> dict[str, Callable[..., DeviceState]]:
        """By command what runs it, of a stage: (device state, operand) -> the state afterwards."""
        state, compile = compiler.abstract(shape), compiler.beside
        calls = {one.name: compile(one.run, state, one.size) for one in self._programs}
        if self.num_host_pages:
            self.host_pages = HostPages(
                state, self._num_layers, self.num_host_pages, compile, self.landing
            )
            calls |= self.host_pages.calls
        return calls

    def idle(self) -> Iterator[tuple[str, np.ndarray]]:
        """Commands that do nothing, to run each program once."""
        for one in self._programs:
            yield from ((one.name, blob) for blob in one.pack(()))

    def before(self, plan: StepPlan) -> Iterator[tuple[str, np.ndarray]]:
        """Commands that come before a step, with their operands."""
        first = plan.num_moves_first
        yield from pack_moves(plan.moves[:first])
        if plan.forks:
            yield from ((CopyProgram.name, blob) for blob in self._copies.pack(plan.forks))
        yield from pack_moves(plan.moves[first:])
        if plan.uploads:
            yield from ((UploadProgram.name, blob) for blob in self._uploads.pack(plan.uploads))

    def close(self) -> None:
        """Let go of the host's pages."""
        if self.host_pages is not None:
            self.host_pages.close()
            self.host_pages = None


def _first_columns(table: jax.Array, given: CopyInputs, count: jax.Array) -> jax.Array:
    """The table with the first columns of each source row in the rows that fork from them."""
    copied = jnp.arange(table.shape[1]) < count[:, None]
    return table.at[given.slot].set(jnp.where(copied, table[given.source], table[given.slot]))


def _entries(rows: Iterator[tuple[int, np.ndarray]]) -> np.ndarray:
    """int32[3, N] (slot, index, value) of every value of every row."""
    parts = [
        np.stack([np.full(len(values), slot), np.arange(len(values)), values])
        for slot, values in rows
    ]
    return np.concatenate([np.zeros((3, 0), np.int32), *parts], axis=1).astype(np.int32)

"""Pages of the KV cache in the host's memory, and the calls that move them there and back."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.device_state import DeviceState
from jaxserve.memory.tier import Landing, Move
from jaxserve.models.kv_cache import KVPages

MOVES = 8  # pages of one call; more take several
OUT, BACK = "pages out", "pages back"  # the commands
SIZE = 2 * MOVES  # of their operand: pairs (device page, host page), with trash pages at the end
MOST_LEAVING = 256  # pages whose copies take the device's memory at once
STALL_S = 0.25  # that a step waits for room among them, once in a stall


def pack_moves(moves: Sequence[Move]) -> Iterator[tuple[str, np.ndarray]]:
    """The commands that do moves in their order, and their operands."""
    for leaves, some in groupby(moves, lambda move: move.leaves):
        # of those that end in one page only the last one counts
        last = {move.host_page if leaves else move.page: move[:2] for move in some}
        pairs = np.array([*last.values()], np.int32)
        for begin in range(0, len(pairs), MOVES):
            now = pairs[begin : begin + MOVES].reshape(-1)
            yield OUT if leaves else BACK, np.pad(now, (0, SIZE - len(now)))


class Leaving(NamedTuple):
    """Copies of pages on their way to the host.

    Attributes:
        hosts: the host page of each row that is to be kept, by row.
        notes: of the listener, a row.
        pages: the copies on the device.
    """

    hosts: dict[int, int]
    notes: dict[int, Any]
    pages: KVPages


class Held(NamedTuple):
    """What this process keeps of an array of pages: what its own devices have of each page.

    Attributes:
        data: [host pages, ...].
        begins: where that begins in a page, by axis.
    """

    data: np.ndarray
    begins: tuple[int, ...]

    @classmethod
    def of(cls, num_pages: int, like: Any) -> Held:
        """Zeros for so many pages, of which a call moves the shape `like`."""
        _, *page = like.shape
        index = like.sharding.addressable_devices_indices_map(like.shape).values()
        # [devices, axes, begin or end]
        parts = np.array([[one.indices(s)[:2] for one, s in zip(own[1:], page)] for own in index])
        begins, ends = parts[..., 0].min(axis=0), parts[..., 1].max(axis=0)
        # as integers of the same size: NumPy copies these without the interpreter's lock
        data = np.zeros((num_pages, *(ends - begins)), f"u{like.dtype.itemsize}")
        return cls(data, tuple(begins.tolist()))

    def place(self, index: Sequence[slice]) -> tuple[slice, ...]:
        """Where a part of a page lies in `data`, behind the host page."""
        whole = zip(index, self.begins, self.data.shape[1:], strict=True)
        return tuple(
            slice(0, size) if one.start is None else slice(one.start - begin, one.stop - begin)
            for one, begin, size in whole
        )


class HostPages:
    """As many pages as were asked for, of all layers; each process keeps what its devices have.

    A thread brings what leaves to the host, so that no step waits for it. Where that thread is
    held up, pages that leave are dropped, which the listener hears. Of several processes each does
    the same, so none drops a page: a step waits for room.

    Args:
        state: of the device, shapes with their shardings.
        num_layers: of its pool.
        num_pages: of the host.
        compile: compiles a function of arrays, an int32 operand of a size and perhaps more arrays,
            which returns `made` or the first arrays.
        landing: the tier that hears of pages that leave; None: another process has it.

    Attributes:
        close: ends the thread, once what is on its way has arrived.
    """

    def __init__(
        self,
        state: DeviceState,
        num_layers: int,
        num_pages: int,
        compile: Callable[..., Any],
        landing: Landing | None = None,
    ):
        def moved(leaf: Any) -> Any:  # of the pages of a call
            where = PartitionSpec(None, None, *leaf.sharding.spec[1:])
            sharding = NamedSharding(leaf.sharding.mesh, where)
            shape = (MOVES, num_layers, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        def places(kv: KVPages, operand: jax.Array) -> jax.Array:
            return kv.of_layers(num_layers, operand.reshape(MOVES, 2)[:, 0]).T

        def take(state: DeviceState, operand: jax.Array) -> KVPages:
            return state.kv.take(places(state.kv, operand))

        def put(state: DeviceState, operand: jax.Array, pages: KVPages) -> DeviceState:
            return state._replace(kv=state.kv.put(places(state.kv, operand), pages))

        self._moved = jax.tree.map(moved, state.kv)
        likes = jax.tree.leaves(self._moved)
        self._held = [Held.of(num_pages, like) for like in likes]
        self._landing = landing
        self._drops = landing is not None and all(
            one.sharding.is_fully_addressable for one in likes
        )
        self._take = compile(take, state, SIZE, made=self._moved)
        self._put = compile(put, state, SIZE, self._moved)
        self._queue: queue.SimpleQueue[Leaving | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: Counter[int] = Counter()  # host pages that are being filled, how often
        self._is_stalled = False
        self._error: BaseException | None = None
        self.close = weakref.finalize(self, self._queue.put, None)
        threading.Thread(
            target=_bring_all, args=(self._queue, weakref.ref(self)), name="host-pages", daemon=True
        ).start()

    @property
    def calls(self) -> dict[str, Callable[[DeviceState, Any], DeviceState]]:
        """By command what runs it: (device state, operand) -> the state afterwards."""
        return {OUT: self._out, BACK: self._back}

    def view(self, host_page: int) -> list[np.ndarray]:
        """A host page: of each array what this process has."""
        return [held.data[host_page] for held in self._held]

    def fill(self, host_page: int, data: bytes) -> None:
        """Write what the parts of a view held, one behind the other, into a host page.

        Any thread may call it, while nothing else writes to the page.
        """
        begin = 0
        for part in self.view(host_page):
            found = np.frombuffer(data, part.dtype, part.size, begin)
            part[...] = found.reshape(part.shape)
            begin += part.nbytes

    def _out(self, state: DeviceState, operand: Any) -> DeviceState:
        pairs = np.asarray(operand).reshape(MOVES, 2).tolist()
        hosts = {row: host for row, (page, host) in enumerate(pairs) if page}
        notes: dict[int, Any] = {}
        landing = self._landing
        if landing is not None:
            notes = {row: landing.leaving(host) for row, host in hosts.items()}
        if not self._has_room(len(hosts)):
            assert landing is not None
            for row, host in hosts.items():
                landing.lost(host, notes[row])
            return state
        pages = self._take(state, operand)
        for leaf in jax.tree.leaves(pages):
            leaf.copy_to_host_async()
        with self._changed:
            self._pending.update(hosts.values())
        self._queue.put(Leaving(hosts, notes, pages))
        return state

    def _has_room(self, count: int) -> bool:
        """Whether copies of more pages may take the device's memory."""
        with self._changed:
            self._raise_error()

            def fits() -> bool:
                return self._pending.total() + count <= MOST_LEAVING or self._error is not None

            if not self._drops:
                return self._changed.wait_for(fits)
            # a stall is waited for once
            has_room = self._changed.wait_for(fits, 0.0 if self._is_stalled else STALL_S)
            self._is_stalled = not has_room
            return has_room

    def _back(self, state: DeviceState, operand: Any) -> DeviceState:
        pairs = np.asarray(operand).reshape(MOVES, 2)
        hosts, wanted = pairs[:, 1], {host for page, host in pairs.tolist() if page}
        with self._changed:
            # a tier names pages that are there; a runner that repeats its commands may be ahead
            self._changed.wait_for(
                lambda: self._error is not None or wanted.isdisjoint(self._pending)
            )
            self._raise_error()

        def placed(held: Held, like: Any) -> jax.Array:
            pages = held.data[hosts].view(like.dtype)

            def part(index: Any) -> np.ndarray:
                found: np.ndarray = pages[(index[0], *held.place(index[1:]))]
                return found

            return jax.make_array_from_callback(like.shape, like.sharding, part)

        leaves, tree = jax.tree.flatten(self._moved)
        pages = jax.tree.unflatten(tree, map(placed, self._held, leaves))
        after: DeviceState = self._put(state, operand, pages)
        return after

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError("pages of the KV cache do not reach the host") from self._error

    def bring(self, leaving: Leaving) -> None:
        """Bring to the host what leaves: the thread's own."""
        try:
            self._bring(leaving)
        except Exception as error:  # the next move raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _bring(self, leaving: Leaving) -> None:
        hosts, notes, pages = leaving
        for held, leaf in zip(self._held, jax.tree.leaves(pages), strict=True):
            for shard in leaf.addressable_shards:
                place: Any = held.place(shard.index[1:])
                found = np.asarray(shard.data).view(held.data.dtype)
                for row, host in hosts.items():
                    held.data[(host, *place)] = found[row]
        with self._changed:
            self._pending.subtract(hosts.values())
            self._pending += Counter()  # forget those that are there
            self._changed.notify_all()
        if self._landing is not None:
            for row, host in hosts.items():
                self._landing.landed(host, notes[row], self.view(host))


def _bring_all(leaving: queue.SimpleQueue[Leaving | None], host: weakref.ref[HostPages]) -> None:
    """The thread: bring copies in their order until there are no host pages any more."""
    while (one := leaving.get()) is not None:
        pages = host()
        if pages is None:
            return
        pages.bring(one)
        del one, pages  # which would keep them alive while the next ones are waited for

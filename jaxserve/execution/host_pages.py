"""Pages of the KV cache in the host's memory, and the calls that move them there and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.device_state import DeviceState
from jaxserve.memory.tier import Move
from jaxserve.models.kv_cache import KVPages

MOVES = 8  # pages of one call; more take several
OUT, BACK = "pages out", "pages back"  # the commands
SIZE = 2 * MOVES  # of their operand: pairs (device page, host page), with trash pages at the end


def pack_moves(moves: Sequence[Move]) -> Iterator[tuple[str, np.ndarray]]:
    """The commands that do moves in their order, and their operands."""
    for leaves, some in groupby(moves, lambda move: move.leaves):
        # of those that end in one page only the last one counts
        last = {move.host_page if leaves else move.page: move[:2] for move in some}
        pairs = np.array([*last.values()], np.int32)
        for begin in range(0, len(pairs), MOVES):
            now = pairs[begin : begin + MOVES].reshape(-1)
            yield OUT if leaves else BACK, np.pad(now, (0, SIZE - len(now)))


class HostPages:
    """As many pages as were asked for, of all layers; each process keeps what its devices have.

    Args:
        state: of the device, shapes with their shardings.
        num_layers: of its pool.
        num_pages: of the host.
        compile: compiles a function of arrays, an int32 operand of a size and perhaps more arrays,
            which returns `made` or the first arrays.

    Attributes:
        calls: by command what runs it: (device state, operand) -> the state afterwards.
    """

    def __init__(
        self,
        state: DeviceState,
        num_layers: int,
        num_pages: int,
        compile: Callable[..., Any],
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
        self._held = jax.tree.map(
            lambda like: np.zeros((num_pages, *like.shape[1:]), like.dtype), self._moved
        )
        self._leaving: list[tuple[np.ndarray, KVPages]] = []  # on their way
        self._take = compile(take, state, SIZE, made=self._moved)
        self._put = compile(put, state, SIZE, self._moved)
        self.calls = {OUT: self._out, BACK: self._back}

    def _out(self, state: DeviceState, operand: Any) -> DeviceState:
        self._arrive(wait=False)
        pages = self._take(state, operand)
        for leaf in jax.tree.leaves(pages):
            leaf.copy_to_host_async()
        self._leaving.append((np.asarray(operand).reshape(MOVES, 2), pages))
        return state

    def _back(self, state: DeviceState, operand: Any) -> DeviceState:
        self._arrive(wait=True)
        hosts = np.asarray(operand).reshape(MOVES, 2)[:, 1]

        def placed(held: np.ndarray, like: Any) -> jax.Array:
            pages = held[hosts]
            return jax.make_array_from_callback(like.shape, like.sharding, pages.__getitem__)

        after: DeviceState = self._put(
            state, operand, jax.tree.map(placed, self._held, self._moved)
        )
        return after

    def _arrive(self, *, wait: bool) -> None:
        """Keep what has come from the device; `wait`: all of it, else in order what is there."""
        while self._leaving:
            pairs, pages = self._leaving[0]
            leaves = jax.tree.leaves(pages)
            if not wait and not all(leaf.is_ready() for leaf in leaves):
                return
            live = pairs[:, 0] > 0
            for held, leaf in zip(jax.tree.leaves(self._held), leaves):
                for shard in leaf.addressable_shards:
                    _, *index = shard.index
                    held[(pairs[live, 1], *index)] = np.asarray(shard.data)[live]
            del self._leaving[0]

"""Moves of pages against NumPy, on a small device state."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.host_pages import MOVES, SIZE, Held, HostPages, pack_moves
from jaxserve.memory.tier import Move
from jaxserve.models.kv_cache import KVCache, KVFormat
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.parallel.mesh import make_mesh
from pallas_kernels import Backends
from tests.waiting import until

LAYERS, PAGES, HOST = 2, 12, 5


def compiled(run: Any, given: Any, size: int, *more: Any, made: Any = None) -> Any:
    return jax.jit(run, donate_argnums=() if made else 0)


@pytest.fixture
def state() -> DeviceState:
    """Of 8-bit pages with scales."""
    cache = KVCache(
        LayerGroups.one(LAYERS), 2, 8, 4, KVFormat.of("int8", "float32"), "cpu",
        Backends("x", "x", "x", ""), num_pages=PAGES,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = StateShape(cache, 3, 16, {}).abstract(make_mesh(1))
    return jax.tree.map(
        lambda s: jax.device_put(jnp.asarray(rng.integers(-99, 99, s.shape), s.dtype), s.sharding),
        shapes,
    )


def places(page: int) -> list[int]:
    return [layer * PAGES + page for layer in range(LAYERS)]


def test_pages_move_in_order_and_nothing_else_changes(state: DeviceState) -> None:
    calls = HostPages(state, LAYERS, HOST, compiled).calls
    rng = random.Random(0)
    want = [np.array(leaf) for leaf in jax.tree.leaves(state.kv)]
    host = [np.zeros((HOST, LAYERS, *leaf.shape[1:]), leaf.dtype) for leaf in want]
    rest = [np.array(leaf) for leaf in jax.tree.leaves(state[1:])]
    longest = 0
    for _ in range(30):
        leaves = rng.random() < 0.5  # long runs of one direction, and short ones
        moves = []
        for _ in range(rng.randrange(2 * MOVES + 4)):
            leaves ^= rng.random() < 0.2
            moves.append(Move(rng.randrange(1, PAGES), rng.randrange(HOST), leaves))
        for page, held, out in moves:
            for mine, its in zip(want, host, strict=True):
                if out:
                    its[held] = mine[places(page)]
                else:
                    mine[places(page)] = its[held]
        commands = list(pack_moves(moves))
        longest = max(longest, len(commands))
        for command, operand in commands:
            assert operand.dtype == np.int32 and operand.shape == (SIZE,)
            state = calls[command](state, operand)
        live = [row for row in range(LAYERS * PAGES) if row % PAGES]
        for found, mine in zip(jax.tree.leaves(state.kv), want, strict=True):
            np.testing.assert_array_equal(np.array(found)[live], mine[live])
    assert longest > 3
    for found, before in zip(jax.tree.leaves(state[1:]), rest, strict=True):
        np.testing.assert_array_equal(found, before)


def test_more_pages_than_a_call_holds_take_several() -> None:
    moves = [Move(1 + page, page, leaves=True) for page in range(2 * MOVES + 1)]
    operands = [operand.reshape(-1, 2) for _, operand in pack_moves(moves)]
    assert len(operands) == 3
    pairs = np.concatenate(operands)
    assert pairs[: len(moves)].tolist() == [[move.page, move.host_page] for move in moves]
    assert not pairs[len(moves) :].any(), "the trash page fills up"


def test_a_process_keeps_what_its_devices_have() -> None:
    """Its two devices have the second and third quarter of an axis."""
    whole = slice(None)
    own = {place: (whole, whole, slice(2 * place, 2 * place + 2)) for place in (1, 2)}
    sharding = SimpleNamespace(addressable_devices_indices_map=lambda shape: own)
    held = Held.of(5, SimpleNamespace(shape=(MOVES, 3, 8), dtype=np.dtype("f4"), sharding=sharding))
    assert held.data.shape == (5, 3, 4)
    for place, one in own.items():
        held.data[(4, *held.place(one[1:]))] = place
    assert held.data[4, 0].tolist() == [1, 1, 2, 2] and not held.data[:4].any()


class Heard:
    """A landing."""

    def __init__(self) -> None:
        self.landings: list[int] = []
        self.losses: list[int] = []

    def leaving(self, host_page: int) -> None:
        return None

    def landed(self, host_page: int, note: Any, parts: Any) -> None:
        self.landings.append(host_page)

    def lost(self, host_page: int, note: Any) -> None:
        self.losses.append(host_page)


@pytest.mark.parametrize("landing", [None, Heard()], ids=["another process", "process 0"])
def test_of_several_processes_none_drops_a_page_and_a_step_waits_for_room(
    landing: Heard | None, state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that several processes do alike is dropped by one of them."""
    go_on, bring = threading.Event(), HostPages.bring

    def stalled(pages: HostPages, *arguments: Any) -> None:
        go_on.wait()
        bring(pages, *arguments)

    monkeypatch.setattr(HostPages, "bring", stalled)
    monkeypatch.setattr("jaxserve.execution.host_pages.MOST_LEAVING", 1)
    monkeypatch.setattr("jaxserve.execution.host_pages.STALL_S", 0.01)
    with monkeypatch.context() as others:
        others.setattr(NamedSharding, "is_fully_addressable", False)
        pages = HostPages(state, LAYERS, HOST, compiled, landing)
    want = [np.array(leaf)[places(2)] for leaf in jax.tree.leaves(state.kv)]

    def move(page: int, held: int) -> None:
        ((command, operand),) = pack_moves([Move(page, held, leaves=True)])
        pages.calls[command](state, operand)

    move(1, 0)
    second = threading.Thread(target=move, args=(2, 1))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits"
    go_on.set()
    second.join()
    ((command, operand),) = pack_moves([Move(5, 1, leaves=False)])
    after = pages.calls[command](state, operand)
    for found, mine in zip(jax.tree.leaves(after.kv), want, strict=True):
        np.testing.assert_array_equal(np.array(found)[places(5)], mine)
    if landing is not None:
        until(lambda: landing.landings == [0, 1])
        assert not landing.losses

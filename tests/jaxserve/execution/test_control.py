"""The control programs against NumPy, on a small device state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.control import FORKS, UPLOAD_TOKENS, Controls, CopyProgram, UploadProgram
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.host_pages import BACK, OUT
from jaxserve.memory.tier import Move
from jaxserve.models.kv_cache import KVPages
from jaxserve.scheduling.plan import Fork, StepPlan, Upload

LAYERS, PAGES, PAGE_SIZE, SLOTS, LENGTH = 2, 12, 4, 6, 24


@pytest.fixture
def state() -> DeviceState:
    rng = np.random.default_rng(0)
    return DeviceState(
        kv=KVPages(
            jnp.asarray(rng.integers(-127, 128, (LAYERS * PAGES, PAGE_SIZE, 2, 1, 8)), jnp.int8),
            *(
                jnp.asarray(rng.normal(size=(LAYERS * PAGES, 1, PAGE_SIZE)), jnp.bfloat16)
                for _ in range(2)
            ),
        ),
        page_table=jnp.asarray(rng.integers(1, PAGES, (SLOTS + 1, LENGTH // PAGE_SIZE)), jnp.int32),
        history=jnp.asarray(rng.integers(0, 99, (SLOTS + 1, LENGTH + 1)), jnp.int32),
        lengths=jnp.asarray(rng.integers(0, LENGTH, SLOTS + 1), jnp.int32),
        features={},
    )


def run(program, state: DeviceState, items) -> DeviceState:
    for blob in program.pack(items):
        state = jax.jit(program.run)(state, blob)
    return state


def copied(state: DeviceState, forks: list[Fork], num_groups: int = 1) -> DeviceState:
    """NumPy's result, one fork after the other."""
    kv = [np.array(array) for array in state.kv]
    table, history, lengths = (np.array(array) for array in state[1:4])
    for source, slot, count, source_pages, pages in forks:
        full = count // PAGE_SIZE * num_groups
        history[slot, :count] = history[source, :count]
        table[slot, :full] = table[source, :full]
        for place, (source_page, page) in enumerate(zip(source_pages, pages), full):
            table[slot, place] = page
            for layer in range(LAYERS):
                for array in kv:
                    array[layer * PAGES + page] = array[layer * PAGES + source_page]
        lengths[slot] = count
    return DeviceState(KVPages(*kv), table, history, lengths, {})


def check(found: DeviceState, wanted: DeviceState) -> None:
    """Equal but for the trash slot and the trash page."""
    live = np.array([row for row in range(LAYERS * PAGES) if row % PAGES])
    for mine, its in zip(found.kv, wanted.kv, strict=True):
        np.testing.assert_array_equal(mine[live], its[live])
    for mine, its in zip(found[1:4], wanted[1:4]):
        np.testing.assert_array_equal(mine[:SLOTS], its[:SLOTS])


def test_a_fork_shares_full_pages_and_copies_the_last(state) -> None:
    forks = [Fork(0, 3, 10, [5], [7]), Fork(0, 4, 10, [5], [8]), Fork(1, 2, 8, [], [])]
    check(run(CopyProgram(LAYERS, SLOTS), state, forks), copied(state, forks))


def test_forks_of_forks_and_of_pages_that_changed_hands_happen_in_order(state) -> None:
    forks = [
        Fork(0, 3, 10, [5], [7]),
        Fork(3, 4, 9, [7], [8]),
        Fork(1, 3, 6, [2], [7]),
        Fork(2, 5, 5, [3], [7]),
    ]
    program = CopyProgram(LAYERS, SLOTS)
    assert len(list(program.pack(forks))) == 3
    check(run(program, state, forks), copied(state, forks))


def test_more_forks_than_a_call_holds(state) -> None:
    forks = [
        Fork(0, 1 + index % (SLOTS - 1), 5, [5], [7 + index % 3]) for index in range(FORKS + 3)
    ]
    check(run(CopyProgram(LAYERS, SLOTS), state, forks), copied(state, forks))


def test_a_fork_copies_the_last_page_of_each_group_of_layers(state) -> None:
    forks = [Fork(0, 3, 5, [5, 2], [7, 4]), Fork(0, 4, 4, [], []), Fork(1, 2, 9, [6, 1], [3, 9])]
    check(run(CopyProgram(LAYERS, SLOTS, 2), state, forks), copied(state, forks, 2))


def test_nothing_to_copy_or_upload_changes_nothing(state) -> None:
    for program in (CopyProgram(LAYERS, SLOTS), UploadProgram(PAGE_SIZE, SLOTS)):
        assert len(list(program.pack(()))) == 1, "a call that warms up"
        check(run(program, state, ()), state)


def test_an_upload_of_more_tokens_than_a_call_holds() -> None:
    length = UPLOAD_TOKENS + 100
    tokens = np.arange(length, dtype=np.int32)
    empty = DeviceState(
        kv=KVPages(jnp.zeros((PAGES, PAGE_SIZE, 2, 1, 8))),
        page_table=jnp.zeros((SLOTS + 1, length // PAGE_SIZE), jnp.int32),
        history=jnp.zeros((SLOTS + 1, length), jnp.int32),
        lengths=jnp.zeros(SLOTS + 1, jnp.int32),
        features={},
    )
    pages = [*range(1, length // PAGE_SIZE + 1)]
    found = run(UploadProgram(PAGE_SIZE, SLOTS), empty, [Upload(2, tokens, pages)])
    np.testing.assert_array_equal(found.history[2], tokens)
    np.testing.assert_array_equal(found.page_table[2], pages)
    assert not np.any(found.history[:2]) and not np.any(found.page_table[:2])


def test_commands_come_in_the_order_that_no_page_is_lost_in() -> None:
    groups = SimpleNamespace(layers_per_page=LAYERS, pages=SimpleNamespace(num_groups=1))
    cache: Any = SimpleNamespace(page_size=PAGE_SIZE, groups=groups)
    controls = Controls(cache, SLOTS, 0)
    moves = [Move(1, 0, leaves=True), Move(2, 0, leaves=False)]
    upload = Upload(2, np.arange(4, dtype=np.int32), [3])
    plan = StepPlan(moves=moves, forks=[Fork(0, 3, 5, [5], [7])], uploads=[upload])
    assert [name for name, _ in controls.before(plan)] == [OUT, "copy", BACK, "upload"]
    assert [name for name, _ in controls.idle()] == ["upload", "copy"]
    assert controls.moving_pages == 0 < Controls(cache, SLOTS, 1).moving_pages

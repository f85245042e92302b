"""The view of a scheduler."""

from __future__ import annotations

import numpy as np

from jaxserve.boundary import engine_view
from jaxserve.boundary.messages import Action, AddGroup, Control
from jaxserve.memory.host_tier import HostPageState, HostTier
from jaxserve.memory.manager import PageManager
from jaxserve.memory.page_pool import PagePool, PageState
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling import view as viewing
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.policies import Length
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits
from jaxserve.scheduling.view import view_of
from tests.jaxserve.observability.test_step_clock import Clock, Run, clock
from tests.jaxserve.requests import make_request

__all__ = ["clock"]  # a fixture

RULE = StopRule(frozenset(), frozenset(), 0, 8)


def request(name: str, prompt: list[int], **options: object) -> Request:
    return make_request(name, prompt, rule=RULE, **options)  # type: ignore[arg-type]


def scheduler(slots: int, num_pages: int = 12, **options: object) -> Scheduler:
    limits = SchedulerLimits(slots, 16, 16, 4, 32)
    return Scheduler(limits, PageManager(num_pages, 4), **options)  # type: ignore[arg-type]


def name_of(one: Request) -> str:
    return one.request_id


def test_states_of_pages() -> None:
    pool = PagePool(8)
    used, known = pool.allocate(3), pool.allocate(1)
    pool.share(used[:1])
    pool.index.put(b"k", known[0])
    pool.release(known)
    states = dict(enumerate(pool.states(), start=1))
    assert [states[page] for page in (*used, *known)] == [
        PageState.SHARED,
        PageState.USED,
        PageState.USED,
        PageState.CACHED,
    ]
    assert sorted(states.values()) == [0, 0, 0, 1, 2, 2, 3]


def test_who_holds_which_page_and_who_waits() -> None:
    found = scheduler(1)
    found.add(request("first", [1] * 9, queueing=Queueing(1.0)))
    for name in ("second", "third"):
        found.add(request(name, [2, 3], queueing=Queueing(2.0)))
    plan = found.plan()
    found.commit(plan, [5])
    view = view_of(found, name_of)
    (slot,) = view.slots
    assert (slot.sequence_id, slot.num_prompt, slot.num_output) == ("first", 9, 1)
    assert slot.num_computed == 9 and slot.num_pages == 3 and slot.max_tokens == 8
    assert not slot.is_prefilling and view.num_slots == 1 and view.num_pages == 11
    cells = np.frombuffer(view.cells, "<u2")
    owned = [page - 1 for page in found.running[0].pages]
    assert all(cells[place] == PageState.USED | (slot.slot + 1) << 2 for place in owned)
    assert cells.sum() == sum(cells[place] for place in owned)
    (queue,) = view.queues
    assert (queue.rank, queue.num_waiting) == (0, 2) and queue.oldest > 0
    assert "1, 1" not in repr(view), "no tokens are told"


def test_the_map_of_the_hosts_memory() -> None:
    tier = HostTier(4)
    tier.is_told = True
    found = Scheduler(SchedulerLimits(1, 16, 16, 4, 32), PageManager(12, 4, tier=tier))
    assert view_of(scheduler(1), name_of).num_host_pages == 0
    first, second = (tier.leaves(key) for key in (b"a", b"b"))
    assert first is not None and second is not None
    tier.landed(first, tier.leaving(first), [])
    view = view_of(found, name_of)
    states = np.zeros(4, np.uint16)
    states[first], states[second] = HostPageState.HELD, HostPageState.ARRIVING
    assert np.frombuffer(view.host_cells, "<u2").tolist() == states.tolist()
    assert (view.num_host_pages, view.host_pages_per_cell) == (4, 1)


def test_queues_are_told_apart_as_the_policy_does() -> None:
    found = scheduler(1, turns=ClientTurns(lambda: Length((4, 8), (4, 2, 1), 8)))
    for name, length in (("a", 2), ("b", 2), ("c", 6), ("d", 12)):
        found.add(request(name, [1] * length))
    assert [(one.rank, one.num_waiting) for one in view_of(found, name_of).queues] == [
        (0, 2),
        (1, 1),
        (2, 1),
    ]


def test_a_cell_of_several_pages_shows_the_highest_state(monkeypatch) -> None:
    monkeypatch.setattr(viewing, "MAX_CELLS", 4)
    assert engine_view.MAX_CELLS > 4
    found = scheduler(1)
    found.add(request("a", [1] * 9))
    found.plan()
    view = view_of(found, name_of)
    assert view.pages_per_cell == 3 and view.num_pages == 11
    cells = np.frombuffer(view.cells, "<u2")
    assert len(cells) == 4
    owned = {(page - 1) // 3 for page in found.running[0].pages}
    assert {place for place, code in enumerate(cells) if code & 3 == PageState.USED} == owned


def test_an_engine_shows_itself_when_it_is_asked_and_also_when_it_has_nothing_to_do(
    clock: Clock,
) -> None:
    run = Run(clock, 2, overlap=True)
    engine = run.engine
    engine.handle(Control(Action.LOOK))
    view = engine.step().view  # type: ignore[attr-defined]
    assert view.slots == [] and view.num_pages == 19
    added = AddGroup(["7.0"], [0], [1, 2], SamplingParams(), RULE, [], Queueing(clock()))
    engine.handle(added)
    assert engine.step().view is None  # type: ignore[attr-defined]
    engine.handle(Control(Action.LOOK))
    seen = engine.step().view  # type: ignore[attr-defined]
    assert [one.sequence_id for one in seen.slots] == ["7.0"]
    assert engine.step().view is None  # type: ignore[attr-defined]

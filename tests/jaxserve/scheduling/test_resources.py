"""Scarce resources of features: only requests that need one wait for it, each in its turn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request.request import Request, RequestState
from jaxserve.scheduling.resources import Resources
from tests.jaxserve.scheduling.test_client_turns import full
from tests.jaxserve.scheduling.test_scheduler import make_request, simple, start, step


class Seats:
    """As many requests as there are seats may have a slot; those with a priority need one."""

    def __init__(self, count: int):
        self.free, self.holders = count, set[str]()

    def takes(self, request: Request) -> bool:
        return request.queueing.priority > 0

    def begin_plan(self) -> None: ...

    def has_room(self, request: Request, *, samples: bool) -> bool:
        return self.free > 0

    def entered(self, request: Request) -> None:
        assert self.free > 0
        self.free -= 1
        self.holders.add(request.request_id)

    def left(self, request: Request) -> None:
        self.free += 1
        self.holders.remove(request.request_id)

    def may_sample(self, request: Request) -> bool:
        return True


def seated(count: int, **sizes: int):
    """A scheduler with seats, and its device."""
    scheduler, device = start(simple(**sizes))
    seats = Seats(count)
    scheduler._resources._parts = (seats,)
    return scheduler, device, seats


def to_the_end(scheduler, device, requests: list[Request], most: int = 400) -> dict[str, int]:
    """Add requests; the step in which each has ended."""
    for one in requests:
        scheduler.add(one)
    ended: dict[str, int] = {}
    for number in range(most):
        step(scheduler, device)
        scheduler.check_integrity()
        for one in requests:
            if one.state is RequestState.FINISHED:
                ended.setdefault(one.request_id, number)
        if not scheduler.has_unfinished:
            break
    assert not scheduler.has_unfinished
    return ended


def test_a_request_without_a_seat_waits_and_lets_other_clients_pass() -> None:
    scheduler, device, seats = seated(1, max_num_seqs=4)
    seated_ones = [full(name, name, [5] * 3, 12, priority=1) for name in "ab"]
    last = to_the_end(scheduler, device, [*seated_ones, full("c", "c", [7] * 3, 4)])
    assert last["c"] < last["a"] < last["b"] and seats.free == 1
    assert scheduler.num_preemptions == 0, "slots and pages do not make up for a seat"


def test_a_client_with_many_slots_gives_none_for_a_seat() -> None:
    scheduler, device, _ = seated(1, max_num_seqs=4)
    scheduler.add(full("a0", "a", [5] * 3, 12, priority=1))
    for index in range(1, 4):
        scheduler.add(full(f"a{index}", "a", [5 + index] * 3, 12))
    step(scheduler, device)
    to_the_end(scheduler, device, [full("b", "b", [4] * 3, 3, priority=1)])
    assert scheduler.num_preemptions <= 1


def test_what_waits_for_a_seat_is_not_short_of_pages() -> None:
    scheduler, device, _ = seated(1, max_num_seqs=4)
    for name in "ab":
        scheduler.add(full(name, name, [5] * 3, 6, priority=1))
    for _ in range(4):
        step(scheduler, device)
        assert scheduler.short_of_pages is None


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from("abc"), st.integers(1, 9)),
        min_size=1,
        max_size=9,
    ),
)
def test_all_end_and_all_seats_come_back(count: int, wanted: list[tuple[int, str, int]]) -> None:
    scheduler, device, seats = seated(count, max_num_seqs=3)
    requests = [
        full(f"{index}", client, [index % 7] * 3, tokens, priority=priority)
        for index, (priority, client, tokens) in enumerate(wanted)
    ]
    last = to_the_end(scheduler, device, requests)
    assert len(last) == len(wanted) and seats.free == count and not seats.holders


def test_most_requests_take_nothing() -> None:
    request, seats = make_request("a", [5], 1), Seats(0)
    resources = Resources((seats,))
    resources.mark(request)
    resources.entered(request)
    assert not request.takes_turns and resources.has_room(request)
    assert resources.may_sample(request)

"""By the callers' numbers."""

from __future__ import annotations

from jaxserve.scheduling.policies import Priority
from tests.jaxserve.scheduling.test_scheduler import alone, make_request, names, simple, start, step


def test_the_smallest_number_first_and_by_arrival_among_equals() -> None:
    scheduler, device = start(simple(policy=Priority, max_num_seqs=1))
    for name, priority in (("a", 1), ("b", 0), ("c", -5), ("d", 0), ("e", 2**40)):
        scheduler.add(make_request(name, [5, 6], 1, priority=priority))
    assert [names(step(scheduler, device))[1][0] for _ in range(5)] == [*"cbdae"]


def test_the_largest_number_is_preempted_though_it_came_first() -> None:
    scheduler, device = start(
        simple(policy=Priority, page_size=1, spare_pages=3, token_budget=24, max_prefill=24)
    )
    loose = make_request("loose", [5] * 10, 14, priority=3)
    urgent = make_request("urgent", [6] * 10, 14, priority=-3)
    scheduler.add(loose)
    step(scheduler, device)
    scheduler.add(urgent)
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert (loose.num_preemptions > 0, urgent.num_preemptions) == (True, 0)
    assert loose.output_token_ids == alone([5] * 10, 14)[0]
    assert urgent.output_token_ids == alone([6] * 10, 14)[0]


def test_who_waits_takes_no_slot_from_who_runs() -> None:
    scheduler, device = start(simple(policy=Priority, max_num_seqs=1))
    scheduler.add(make_request("running", [5, 6], 4, priority=9))
    step(scheduler, device)
    scheduler.add(make_request("urgent", [5, 6], 1, priority=0))
    assert names(step(scheduler, device)) == (["running"], [])

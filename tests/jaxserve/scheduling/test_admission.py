"""Who may wait."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxserve.errors import QueueFullError
from jaxserve.scheduling.admission import Admission
from tests.resolved_config import resolved_config

TIMES = itertools.count(1.0)  # of arrivals


def admission(**settings: Any) -> Admission:
    return Admission(resolved_config(max_num_seqs=4, **settings))


def crawl(found: Admission, seconds: float, tokens: int = 100, running: int = 4) -> float:
    """A request of `tokens` begins each `seconds` while others wait; returns the time."""
    for name in range(100):
        found.added(f"crawl{name}", tokens, 0, next(TIMES))
    for number in range(60):
        found.stepped([f"crawl{number}"], number * seconds, running)
    for name in range(60, 100):
        found.ended(f"crawl{name}")
    return 60 * seconds


def refused(found: Admission, tokens: int, priority: int = 0) -> str | None:
    try:
        found.check(tokens, priority, next(TIMES))
    except QueueFullError as error:
        return error.limit
    return None


def test_without_limits_everybody_may_wait() -> None:
    found = admission()
    for index in range(10_000):
        found.check(1000, 0, next(TIMES))
        found.added(str(index), 1000, 0, next(TIMES))


def test_requests_that_wait_are_counted_until_they_begin_or_end() -> None:
    found = admission(max_num_queued_reqs=2)
    found.added("a", 5, 0, next(TIMES))
    found.added("b", 5, 0, next(TIMES))
    assert refused(found, 5) == "max_num_queued_reqs"
    found.stepped(["a", "unknown"], 1.0, 1)
    assert refused(found, 5) is None
    with pytest.raises(QueueFullError):
        found.check_room(2)
    found.ended("b")
    found.ended("b")
    found.check_room(2)


def test_tokens_that_wait_are_limited_but_one_request_may_be_as_long_as_it_is() -> None:
    found = admission(max_num_queued_tokens=100)
    assert refused(found, 500) is None
    found.added("a", 60, 0, next(TIMES))
    assert refused(found, 40) is None
    assert refused(found, 41) == "max_num_queued_tokens"
    found.check_room()
    found.added("b", 41, 0, next(TIMES))
    with pytest.raises(QueueFullError, match="101 prompt tokens wait"):
        found.check_room()


def test_nothing_is_predicted_before_anybody_was_kept_waiting() -> None:
    found = admission(max_queue_wait=1.0)
    for number in range(100):
        found.added(str(number), 10**6, 0, next(TIMES))
        found.stepped([str(number)], 10.0 * number, 1)
        assert refused(found, 10**6) is None, "each began with the next step"
    found.added("one that waits", 10**6, 0, next(TIMES))
    assert refused(found, 1) is None, "an engine that is given little begins little"


def test_a_wait_is_predicted_from_how_fast_requests_have_begun() -> None:
    found = admission(max_queue_wait=1.0)
    crawl(found, 0.02, running=1)  # 5,000 tokens a second
    for name, tokens in (("a", 3000), ("b", 1900)):
        assert refused(found, 1) is None
        found.added(name, tokens, 0, next(TIMES))
    assert refused(found, 1) is None
    found.added("c", 500, 0, next(TIMES))
    with pytest.raises(QueueFullError, match=r"predicted wait is 1\.1 s") as error:
        found.check(1, 0, next(TIMES))
    assert error.value.retry_after == pytest.approx(5400 / 5000, rel=0.02)


def test_with_all_slots_taken_somebody_has_to_leave_first() -> None:
    found = admission(max_queue_wait=1.0)
    now = crawl(found, 1.5)
    assert refused(found, 1) == "max_queue_wait", "1.5 s until a slot is free"
    found.stepped([], now, 3)
    assert refused(found, 1) is None


def test_the_end_of_who_ran_frees_a_slot_though_no_step_follows() -> None:
    found = admission(max_queue_wait=1.0)
    crawl(found, 1.5)
    assert refused(found, 1) == "max_queue_wait"
    found.ended("one that runs")
    assert refused(found, 1) is None


def test_the_prompts_of_one_call_are_let_in_together() -> None:
    found = admission(max_queue_wait=1.0)
    crawl(found, 0.5, running=1)  # 200 tokens a second
    for index in range(50):
        found.check(100, 0, 7.0)
        found.added(f"b{index}", 100, 0, 7.0)
    assert refused(found, 1) == "max_queue_wait", "another call waits for all of them"


def test_only_who_goes_before_counts() -> None:
    found = admission(max_queue_wait=1.0, scheduling_policy="priority")
    crawl(found, 0.02, running=1)
    found.added("long", 9000, 5, next(TIMES))
    assert refused(found, 1, priority=5) == "max_queue_wait"
    assert refused(found, 1, priority=4) is None
    found.check_room()
    found = admission(max_queue_wait=1.0, scheduling_policy="length")
    crawl(found, 0.02, running=1)
    found.added("long", 9000, 0, next(TIMES))
    assert (refused(found, 600), refused(found, 100)) == ("max_queue_wait", None)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    found = admission(max_queue_wait=1.0)
    now = crawl(found, 0.5, running=1)  # 200 tokens a second
    found.added("long", 1000, 0, next(TIMES))
    assert refused(found, 1) == "max_queue_wait"
    for number in range(400):
        found.added(f"f{number}", 1000, 0, next(TIMES))
    for number in range(400):
        now += 0.05
        found.stepped([f"f{number}"], now, 1)
    assert refused(found, 1) is None, "20,000 tokens a second by now"


def test_of_a_queue_that_has_stood_for_its_limit_half_is_allowed() -> None:
    found = admission(max_queue_wait=1.0)
    assert found.allowed_wait == 1.0
    for index in range(20):
        found.added(str(index), 1, 0, next(TIMES))
    for number in range(10):
        found.stepped([], number / 10, 4)
    assert found.allowed_wait == 1.0, "a burst may fill it"
    for number in range(10, 16):
        found.stepped([], number / 10, 4)
    assert found.allowed_wait == 0.5
    found.stepped([str(index) for index in range(20)], 1.6, 4)
    assert found.allowed_wait == 1.0, "nobody waits any more"
    found.added("next", 1, 0, next(TIMES))
    for number in range(17, 27):
        found.stepped([], number / 10, 4)
    assert found.allowed_wait == 1.0, "it stands from now on"


def test_a_new_engine_has_no_queue_that_has_stood() -> None:
    found = admission(max_queue_wait=1.0)
    found.added("a", 1, 0, next(TIMES))
    for number in range(16):
        found.stepped([], number / 10, 4)
    assert found.allowed_wait == 0.5
    found.restarted(60.0)
    found.stepped([], 60.1, 4)
    assert found.allowed_wait == 1.0


def test_who_waits_in_a_standing_queue_is_refused_by_what_is_allowed() -> None:
    found = admission(max_queue_wait=1.0)
    for number in range(40):
        found.added(str(number), 1, 0, next(TIMES))
    for number in range(30):  # ten a second, for 3 s
        found.stepped([str(number)], number / 10, 4)
    for number in range(36, 40):
        found.ended(str(number))
    with pytest.raises(QueueFullError, match=r"wait is 0\.7 s, 0\.5 s is allowed"):
        found.check(1, 0, next(TIMES))
    for number in range(33, 36):
        found.ended(str(number))
    assert refused(found, 1) is None, "0.4 s"


def test_requests_that_were_let_in_and_are_not_added_yet_count_in_the_wait() -> None:
    found = admission(max_queue_wait=1.0, max_num_queued_reqs=2)
    found.check_room(entering=50)  # they may be long in coming, and nobody waits
    found = admission(max_queue_wait=1.0)
    crawl(found, 0.1)
    found.check_room(entering=5)
    with pytest.raises(QueueFullError, match=r"wait is 1\.1 s"):
        found.check_room(entering=10)


@pytest.mark.parametrize("policy", ["priority", "length"])
def test_who_may_go_before_them_does_not_wait_for_those_that_enter(policy: str) -> None:
    found = admission(max_queue_wait=1.0, scheduling_policy=policy)
    crawl(found, 0.1)
    found.check_room(entering=10)

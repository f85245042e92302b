"""Which requests may wait."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import QueueFullError
from jaxserve.scheduling.ledger import Ledger, Work
from tests.resolved_config import resolved_config

SLOTS = 4


class Bench:
    """A ledger, its clock, and an engine of as many slots that serves in the order of arrival."""

    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        self.ledger = Ledger(resolved_config(max_num_seqs=SLOTS, **settings), lambda: self.now)
        self.count = 0

    def admit(self, client: str = "", **fields: Any) -> str:
        self.count += 1
        name = f"r{self.count}"
        self.ledger.admit({name: Work(client, fields.pop("num_prompt", 5), **fields)})
        return name

    def refused(self, client: str = "", **fields: Any) -> str | None:
        """The limit that refuses a request, which is not let in."""
        try:
            self.ledger.ended(self.admit(client, **fields))
        except QueueFullError as error:
            return error.limit
        return None

    def step(self, *begun: str, running: int = SLOTS, seconds: float = 0.1) -> None:
        self.now += seconds
        self.ledger.stepped(begun, running, self.now)

    def crawl(self, seconds: float = 0.1, client: str = "") -> list[str]:
        """A slot is freed each `seconds` while others wait; what is left has slots."""
        names = [self.admit(client) for _ in range(40 + SLOTS)]
        self.step(*names[:SLOTS], seconds=0.0)
        for place in range(40):
            self.ledger.ended(names[place])
            self.step(names[place + SLOTS], seconds=seconds)
        return names[-SLOTS:]


def test_without_limits_any_number_may_wait() -> None:
    bench = Bench()
    for _ in range(10_000):
        bench.admit(num_prompt=1000, sequences=3)
    assert bench.ledger.num_waiting == 10_000


def test_a_burst_waits_where_nothing_limits_the_wait() -> None:
    """The default of a server."""
    bench = Bench(max_num_queued_reqs=2048)
    bench.crawl(10.0)
    for _ in range(2000):
        bench.admit()
    assert bench.refused() is None


def test_requests_wait_until_they_begin_or_end() -> None:
    bench = Bench(max_num_queued_reqs=2)
    first, second = bench.admit(), bench.admit()
    assert bench.refused() == "max_num_queued_reqs"
    bench.step(first, "unknown", running=1)
    assert bench.refused() is None
    with pytest.raises(QueueFullError, match="1 requests wait, 2 may"):
        bench.ledger.check(requests=2)
    for _ in range(2):
        bench.ledger.ended(second)
    bench.ledger.check(requests=2)


def test_tokens_that_wait_are_limited_but_one_request_may_be_as_long_as_it_is() -> None:
    bench = Bench(max_num_queued_tokens=100)
    assert bench.refused(num_prompt=500) is None
    bench.admit(num_prompt=60)
    assert bench.refused(num_prompt=40) is None
    assert bench.refused(num_prompt=41) == "max_num_queued_tokens"
    bench.admit(num_prompt=40)
    with pytest.raises(QueueFullError, match="100 prompt tokens wait"):
        bench.admit(num_prompt=1)


def test_a_call_is_let_in_whole_or_not_at_all() -> None:
    bench = Bench(max_num_queued_reqs=3)
    bench.admit()
    with pytest.raises(QueueFullError):
        bench.ledger.admit({name: Work("", 1) for name in "abc"})
    assert bench.ledger.num_waiting == 1 and not bench.ledger.is_admitted("a")
    bench.ledger.admit({name: Work("", 1) for name in "ab"})
    assert bench.ledger.num_waiting == 3


def test_a_full_queue_of_one_client_refuses_no_other_below_its_share() -> None:
    bench = Bench(max_num_queued_reqs=100)
    for _ in range(100):
        bench.admit("a")
    assert bench.refused("a") == "max_num_queued_reqs"
    for _ in range(50):  # of two clients
        bench.admit("b")
    assert bench.refused("b") == bench.refused("a") == "max_num_queued_reqs"
    for _ in range(33):
        bench.admit("c")
    assert bench.refused("c") == "max_num_queued_reqs"
    others = [bench.refused(f"d{n}") or bench.admit(f"d{n}") for n in range(40)]
    assert bench.ledger.num_waiting == 200 and others[-1] == "max_num_queued_reqs", "in all"


def test_a_full_queue_of_tokens_refuses_no_other_below_its_share() -> None:
    bench = Bench(max_num_queued_tokens=1000)
    bench.admit("a", num_prompt=1000)
    assert bench.refused("a", num_prompt=1) == "max_num_queued_tokens"
    assert bench.refused("b", num_prompt=500) is None
    assert bench.refused("b", num_prompt=501) == "max_num_queued_tokens"


def test_a_head_counts_when_its_body_is_there_and_once() -> None:
    bench = Bench(max_num_queued_reqs=2)
    entries = [bench.ledger.enter("") for _ in range(1000)]
    bench.ledger.check(requests=2)
    for entry in entries[:2]:
        for _ in range(2):
            entry.arrive()
    assert bench.ledger.num_entering == 2
    with pytest.raises(QueueFullError):
        bench.ledger.check()
    for entry in entries:
        entry.leave()
    entries[0].leave()
    assert bench.ledger.num_entering == 0
    bench.ledger.check(requests=2)


def test_nothing_is_predicted_before_sequences_had_to_wait_for_slots() -> None:
    bench = Bench(max_queue_wait=1.0)
    for _ in range(100):
        name = bench.admit(num_prompt=10**6)
        bench.step(name, running=1, seconds=10.0)
        bench.ledger.ended(name)
    assert bench.refused() is None, "an engine that is given little frees few slots"
    for _ in range(500):
        assert bench.refused() is None
        bench.admit()


def test_a_wait_is_predicted_from_the_rate_at_which_slots_become_free() -> None:
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(0.1)
    for _ in range(8):
        bench.admit()
    assert bench.ledger.predicted_wait("", 0) == pytest.approx(0.9, rel=0.1)
    assert bench.refused() is None
    bench.admit(sequences=3)
    with pytest.raises(QueueFullError, match=r"predicted wait is 1\.[12] s, 1 s is") as error:
        bench.admit()
    assert error.value.retry_after == pytest.approx(1.2, rel=0.1)


def test_slots_that_none_leaves_make_the_wait_longer() -> None:
    """Sequences of thousands of tokens hold all slots: that others began lately says nothing."""
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(0.01)
    for _ in range(2):
        bench.admit()
    assert bench.refused() is None
    for _ in range(100):
        bench.step(seconds=0.3)
    assert bench.refused() == "max_queue_wait"


def test_sequences_count_as_what_they_are() -> None:
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(0.1)
    many = bench.admit(sequences=20)
    assert bench.refused() == "max_queue_wait"
    bench.step(many)
    assert bench.refused() == "max_queue_wait", "one of them has begun"
    for _ in range(14):
        bench.ledger.sequence_ended(many)
    assert bench.refused() is None
    bench.ledger.ended(many)


def test_a_client_below_its_share_does_not_wait_for_others() -> None:
    """The scheduler gives it a slot at once."""
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(0.1, "a")
    for _ in range(7):
        bench.admit("a")
    assert bench.refused("a") is None
    bench.admit("a", sequences=5)
    assert bench.refused("a") == "max_queue_wait"
    names = [bench.admit("b") for _ in range(2)]
    assert len(names) == SLOTS // 2
    bench.step(*names)
    assert bench.ledger.predicted_wait("b", 0) == pytest.approx(2 * 0.1, rel=0.2)


def test_where_pages_are_short_fewer_run_than_there_are_slots() -> None:
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(2.0)
    assert bench.refused() == "max_queue_wait", "2 s until a slot is free"
    bench.ledger.ended("r41")
    bench.step(running=3)
    assert bench.refused() is None, "there is a free one"
    bench.admit()
    for _ in range(3):  # plans have passed it over
        bench.step(running=3)
    assert bench.refused() == "max_queue_wait"


def test_a_call_is_not_refused_for_its_own_length() -> None:
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(0.1)
    bench.ledger.admit({f"b{n}": Work("", 5) for n in range(500)})
    assert bench.refused() == "max_queue_wait", "another call waits for all of them"


def test_only_requests_that_go_before_count() -> None:
    bench = Bench(max_queue_wait=1.0, scheduling_policy="priority")
    bench.crawl(0.1)
    for _ in range(12):
        if bench.refused(priority=5) is None:
            bench.admit(priority=5)
    assert bench.refused(priority=5) == "max_queue_wait"
    assert bench.refused(priority=4) is None
    bench.ledger.check()


def test_under_length_those_that_ask_for_much_output_go_later() -> None:
    bench = Bench(max_queue_wait=1.0, scheduling_policy="length")
    bench.crawl(0.1)
    for _ in range(30):
        if bench.refused(num_output=40_000) is None:
            bench.admit(num_output=40_000)
    assert bench.refused(num_output=40_000) == "max_queue_wait"
    assert bench.refused(num_output=4_095) is None


@pytest.mark.parametrize("policy", ["priority", "length"])
def test_requests_that_may_go_first_do_not_wait_for_those_that_enter(policy: str) -> None:
    for name, is_refused in (("fcfs", True), (policy, False)):
        bench = Bench(max_queue_wait=1.0, scheduling_policy=name)
        bench.crawl(0.1)
        for _ in range(15):
            bench.ledger.enter("").arrive()
        assert (bench.refused() is not None) is is_refused


def test_what_this_process_is_behind_the_engine_is_waited_for_twice() -> None:
    bench = Bench(max_queue_wait=1.0)
    bench.now = 10.0
    bench.ledger.stepped((), 1, 9.6)
    assert bench.refused() is None
    bench.ledger.stepped((), 1, 9.4)
    assert bench.refused() == "max_queue_wait"
    bench.now += 1
    assert bench.refused() is None, "nothing is known of now"


def test_a_new_engine_is_not_judged_by_the_time_without_one() -> None:
    bench = Bench(max_queue_wait=1.0)
    left = bench.crawl(0.05)
    bench.admit()
    bench.now += 60.0
    bench.ledger.restarted()
    bench.step(*left)
    assert bench.refused() is None


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_nothing_is_left_of_what_has_ended(seed: int) -> None:
    """Whatever comes in whatever order, every count is that of what is there."""
    bench, rng = Bench(), random.Random(seed)
    ledger, live, entries = bench.ledger, dict[str, int](), []
    for _ in range(200):
        client = rng.choice("abc")
        match rng.randrange(6):
            case 0:
                live[bench.admit(client, sequences=rng.randint(1, 5))] = 0
            case 1 if live:
                ledger.sequence_ended(rng.choice([*live]))
            case 2 if live:
                name = rng.choice([*live])
                del live[name]
                ledger.ended(name)
            case 3:
                begun = [name for name in live if rng.random() < 0.3]
                bench.step(*begun, running=rng.randint(0, SLOTS))
            case 4:
                entries.append(ledger.enter(client))
                entries[-1].arrive()
            case 5 if entries:
                entries.pop().leave()
        assert ledger.num_waiting == len(ledger._waiting) <= len(live)
        assert ledger._sequences == sum(one.sequences for one in ledger._admitted.values())
        assert ledger._sequences == sum(one.sequences for one in ledger._accounts.values())
        assert ledger._tokens == sum(one.tokens for one in ledger._accounts.values()) >= 0
    for name in live:
        ledger.ended(name)
    for entry in entries:
        entry.leave()
    assert not ledger._accounts and not ledger._admitted and not ledger._waiting
    assert ledger._sequences == ledger._tokens == ledger.num_entering == 0

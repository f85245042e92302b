"""The limits on requests that wait."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import QueueFullError
from jaxserve.scheduling import ledger as ledger_module
from jaxserve.scheduling.ledger import MEMORY_S, Ledger
from jaxserve.scheduling.ledger_accounts import MOST_OUTPUT, RequestWork
from jaxserve.scheduling.policies import FirstComeFirstServed
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
        self.ledger.admit({name: RequestWork(client, fields.pop("num_prompt", 5), **fields)})
        return name

    def admit_anyway(self, **fields: Any) -> str:
        """A request that came in before it was known how long it would wait."""
        ledger = self.ledger
        held, ledger._held = ledger._held, 0.0
        name = self.admit(**fields)
        ledger._held = held
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
        bench.ledger.admit({name: RequestWork("", 1) for name in "abc"})
    assert bench.ledger.num_waiting == 1 and not bench.ledger.is_admitted("a")
    bench.ledger.admit({name: RequestWork("", 1) for name in "ab"})
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


def test_nothing_is_predicted_before_slots_were_held_for_a_while() -> None:
    bench = Bench(max_queue_wait=1.0)
    for _ in range(500):
        assert bench.refused() is None
        bench.admit()


def test_what_ends_without_a_queue_tells_how_long_a_slot_is_held() -> None:
    bench = Bench(max_queue_wait=1.0)
    for _ in range(10):
        names = [bench.admit() for _ in range(SLOTS - 1)]
        bench.step(*names, running=SLOTS - 1, seconds=0.0)
        assert bench.ledger.predicted_wait("", 0) == 0, "a slot is free"
        bench.step(running=SLOTS - 1, seconds=2.0)
        for name in names:
            bench.ledger.ended(name)
    for _ in range(SLOTS):
        bench.admit()
    assert bench.ledger.predicted_wait("", 0) == pytest.approx(2.0 / SLOTS, rel=0.3)
    let_in = 0
    while bench.refused() is None:
        bench.admit()
        let_in += 1
    assert let_in in (1, 2)


def test_what_slots_did_is_forgotten_whether_or_not_there_are_steps() -> None:
    bench = Bench(max_queue_wait=1.0)
    left = bench.crawl(2.0)
    assert bench.refused() == "max_queue_wait"
    for name in left:
        bench.ledger.ended(name)
    bench.now += 3.0
    names = [bench.admit() for _ in range(SLOTS)]
    assert bench.ledger.predicted_wait("", 0) > 0, "it is known still"
    for name in names:
        bench.ledger.ended(name)
    bench.now += 20.0
    for _ in range(100):
        assert bench.refused() is None
        bench.admit()


def test_time_without_work_is_no_time_that_slots_were_held() -> None:
    bench = Bench(max_queue_wait=1.0)
    for name in bench.crawl(0.1):
        bench.ledger.ended(name)
    bench.now += 3600.0
    names = [bench.admit() for _ in range(SLOTS * 5)]
    bench.step(*names[:SLOTS], seconds=0.1)
    assert bench.ledger.predicted_wait("", 0) == 0, "nothing is known of now"
    for _ in range(28):
        bench.step(seconds=0.1)
    excess = SLOTS * 4 + 1
    assert bench.ledger.predicted_wait("", 0) <= excess / SLOTS * 2 * MEMORY_S


def test_slots_are_held_until_they_are_freed_whether_or_not_a_step_is_told_of() -> None:
    bench = Bench(max_queue_wait=1.0)
    names = [bench.admit() for _ in range(SLOTS)]
    bench.step(*names, seconds=0.0)
    bench.now += 1.0
    for name in names:
        bench.ledger.ended(name)
    for _ in range(SLOTS):
        bench.admit()
    assert bench.ledger.predicted_wait("", 0) == pytest.approx(1.0 / SLOTS, rel=0.2)


def test_where_longer_waits_are_allowed_slots_are_remembered_for_longer() -> None:
    bench = Bench(max_queue_wait=30.0)
    bench.crawl(8.0)
    assert bench.ledger.predicted_wait("", 0) == pytest.approx(8.0, rel=0.3)


def test_slots_that_are_freed_together_count_all_of_them() -> None:
    """Of groups as large as the engine: when one ends there are no more sequences than slots."""
    bench = Bench(max_queue_wait=10.0)
    names = [bench.admit(sequences=SLOTS) for _ in range(2)]
    for _ in range(12):
        bench.step(names[0])
        for _ in range(9):
            bench.step()
        for _ in range(SLOTS):
            bench.ledger.sequence_ended(names[0])
        bench.ledger.ended(names.pop(0))
        names.append(bench.admit(sequences=SLOTS))
    whole = (SLOTS + 1) / SLOTS  # of the second group, which each slot holds for a second
    assert bench.ledger.predicted_wait("", 0) == pytest.approx(whole, rel=0.2)


def test_of_a_large_group_that_is_dropped_as_many_slots_are_freed_as_there_are() -> None:
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(2.0)
    many = bench.admit_anyway(sequences=1000)
    bench.step(many)
    freed = bench.ledger._freed
    bench.ledger.ended(many)
    assert bench.ledger._freed == pytest.approx(freed + SLOTS)


def test_what_waits_for_its_grammar_is_in_no_queue() -> None:
    bench = Bench(max_queue_wait=1.0)
    bench.crawl(0.1)
    names = [bench.admit(sequences=4, compiles=True) for _ in range(20)]
    assert bench.ledger.num_waiting == 20 and bench.refused() is None
    for _ in range(5):
        bench.step()
    assert bench.ledger.capacity == SLOTS, "no plan has passed them over"
    assert bench.ledger.compiled(names[0]) and not bench.ledger.compiled(names[0])
    assert not bench.ledger.compiled("unknown") and not bench.ledger.compiled("r41")
    for name in names[1:10]:
        bench.ledger.compiled(name)
    assert bench.refused() == "max_queue_wait"
    bench.step(names[10])
    assert bench.ledger._admitted[names[10]].sequences == 4, "it has begun, so it was compiled"
    for name in names:
        bench.ledger.ended(name)
    assert bench.refused() is None


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
    bench.ledger.admit({f"b{n}": RequestWork("", 5) for n in range(500)})
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


def test_what_enters_does_not_hold_up_who_asks_for_less_under_a_policy_by_output() -> None:
    class ByOutput(FirstComeFirstServed):
        def rank(self, num_prompt: int, priority: int, num_output: int = 0) -> int:
            return num_output

    waits = []
    for policy in (FirstComeFirstServed, ByOutput):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ledger_module, "make_policy", lambda config, made=policy: made())
            bench = Bench()
        bench.crawl(0.1)
        for _ in range(40):
            bench.ledger.enter("").arrive()
        waits.append(bench.ledger.predicted_wait("", 0))
    assert waits[0] > 5 * waits[1]


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


class Simulated(Bench):
    """An engine that gives slots in the order of arrival, and of which waits are measured.

    A request that has waited for `max_queue_wait` is ended, as the engine's client does.
    """

    STEP_S = 0.02

    def __init__(self, wait: float) -> None:
        super().__init__(max_queue_wait=wait)
        self.wait = wait
        self.queue: list[tuple[str, float, float]] = []  # sequences: of which, since when, length
        self.running: list[tuple[str, float]] = []  # and when each ends
        self.left: dict[str, int] = {}  # sequences of requests
        self.waits: list[tuple[float, float]] = []  # when a request came and how long it waited
        self.num_refused = self.num_late = self.num_ended = 0

    def send(self, seconds: float, sequences: int = 1) -> None:
        try:
            name = self.admit(sequences=sequences)
        except QueueFullError:
            self.num_refused += 1
            return
        self.left[name] = sequences
        self.queue += [(name, self.now, seconds)] * sequences

    def turn(self) -> None:
        """One step."""
        self.now += self.STEP_S
        for name, _ in [one for one in self.running if one[1] <= self.now]:
            self.left[name] -= 1
            self.ledger.sequence_ended(name)
            if not self.left[name]:
                self.num_ended += 1
                self.ledger.ended(name)
        self.running = [one for one in self.running if one[1] > self.now]
        waiting = self.ledger._waiting
        late = {name for name, came, _ in self.queue if self.now - came > self.wait}
        for name in late & waiting.keys():
            self.ledger.ended(name)
            self.num_late += 1
            self.queue = [one for one in self.queue if one[0] != name]
        begun = {}
        while self.queue and len(self.running) < SLOTS:
            name, came, seconds = self.queue.pop(0)
            self.running.append((name, self.now + seconds))
            if name in waiting and name not in begun:
                begun[name] = None
                self.waits.append((came, self.now - came))
        self.ledger.stepped(begun, len(self.running), self.now)


def test_a_steady_overload_is_refused_and_what_is_let_in_begins_in_time() -> None:
    for each, sequences in ((0.2, 1), (0.05, 1), (0.4, 3)):
        bench = Simulated(wait=1.0)
        rate = 3 * SLOTS / each / sequences  # a second: three times what can be served
        sent, seconds = 0.0, 20
        while bench.now < seconds:
            sent += rate * bench.STEP_S
            while sent >= 1:
                sent -= 1
                bench.send(each, sequences)
            bench.turn()
        assert max(wait for came, wait in bench.waits if came > 3) <= 1.2
        taken = each + bench.STEP_S  # in steps
        assert bench.num_ended >= 0.9 * seconds * SLOTS / taken / sequences, "no slot is left free"
        # the prediction does it, not the end of those that have waited in vain
        assert bench.num_refused > 8 * bench.num_late


def test_after_a_burst_of_long_groups_short_requests_are_let_in() -> None:
    bench = Simulated(wait=1.0)
    bench.now = 3600.0  # a server that was idle
    for _ in range(20):
        bench.send(5.0, sequences=16)
    while bench.ledger.num_waiting:
        bench.turn()
        assert bench.ledger.predicted_wait("", 0) < 21 * 16 / SLOTS * 10
    assert bench.num_late == 19, "one group has begun and holds all slots"
    while bench.running:
        bench.turn()
    assert bench.num_ended == 1 and bench.refused() is None
    # a little more than there are slots, at all times
    for _ in range(300):
        for _ in range(SLOTS + 2 - len(bench.running) - len(bench.queue)):
            bench.send(0.1)
        bench.turn()
    assert bench.num_ended > 100 and bench.num_refused < bench.num_ended / 4
    refused = bench.num_refused
    for _ in range(50):
        for _ in range(SLOTS + 2 - len(bench.running) - len(bench.queue)):
            bench.send(0.1)
        bench.turn()
    assert bench.num_refused == refused, "none at last"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_nothing_is_left_of_what_has_ended(seed: int) -> None:
    """Whatever comes in whatever order, every count is that of what is there."""
    bench, rng = Bench(), random.Random(seed)
    ledger, live, entries = bench.ledger, dict[str, int](), []
    for _ in range(200):
        client = rng.choice("abc")
        match rng.randrange(8):
            case 0:
                compiles = rng.random() < 0.3
                name = bench.admit(client, sequences=rng.randint(1, 5), compiles=compiles)
                live[name] = 0
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
            case 6 if live:
                ledger.compiled(rng.choice([*live]))
            case 7 if rng.random() < 0.1:
                ledger.restarted()
        assert ledger.num_waiting == len(ledger._waiting) <= len(live)
        assert ledger._sequences == sum(one.sequences for one in ledger._admitted.values())
        assert ledger._sequences == sum(one.sequences for one in ledger._accounts.values())
        assert ledger._tokens == sum(one.tokens for one in ledger._accounts.values()) >= 0
        assert len(ledger._begun) == len(live) - ledger.num_waiting
        for one in ledger._accounts.values():
            counts = one.entering, one.admitted, one.waiting, one.tokens, one.sequences
            assert min(counts) >= 0 and min(one.waiting_by_rank.values(), default=1) > 0
        assert ledger._held >= 0 and ledger._freed >= 0 and ledger.predicted_wait(client, 0) >= 0
    for name in live:
        ledger.ended(name)
    for entry in entries:
        entry.leave()
    assert not ledger._accounts and not ledger._admitted
    assert not ledger._waiting and not ledger._begun
    assert ledger._sequences == ledger._tokens == ledger.num_entering == 0


def test_engines_beside_each_other_have_the_slots_of_all() -> None:
    config = resolved_config(max_num_seqs=SLOTS)
    ledger = Ledger(config, lambda: 0.0, engines=2)
    assert ledger.capacity == 2 * SLOTS
    ledger.lost(1)
    assert ledger.capacity == SLOTS
    ledger.restarted(1)
    assert ledger.capacity == 2 * SLOTS
    ledger.admit({"a": RequestWork("", 5)})
    for _ in range(9):
        ledger.stepped([], 1, None, 1)
    assert ledger.capacity == 2 * SLOTS, "the other engine's steps do not pass it over"
    for _ in range(9):
        ledger.stepped([], 1, None, 0)
    assert ledger.capacity == SLOTS + 1


def test_what_a_lost_engine_has_holds_up_nobody_at_the_others() -> None:
    now = 0.0
    config = resolved_config(max_num_seqs=SLOTS, max_queue_wait=1.0)
    ledger = Ledger(config, lambda: now, engines=2)
    names = [f"r{index}" for index in range(2 * SLOTS)]
    ledger.admit(
        {name: RequestWork("a", 5, engine=index // SLOTS) for index, name in enumerate(names)}
    )
    for engine in (0, 1):
        ledger.stepped(names[engine * SLOTS :][:SLOTS], SLOTS, now, engine)
    ledger.admit({f"w{index}": RequestWork("a", 5, engine=1) for index in range(SLOTS)})
    now = 60.0
    ledger.stepped([], SLOTS, now, 0)
    ledger.ended(names[0])
    with pytest.raises(QueueFullError):
        ledger.check("a")
    ledger.lost(1)
    ledger.lost(1)
    ledger.check("a")
    ledger.moved("w0", 0)
    with pytest.raises(QueueFullError):
        ledger.check("a")
    assert ledger.engine_of("w0") == 0 and ledger.work(0) == 5
    ledger.ended("w0")
    ledger.ended("w1")
    ledger.restarted(1)
    ledger.stepped([], SLOTS, now, 1)
    assert ledger._sequences == 2 * SLOTS - 1 + SLOTS - 2 == ledger._accounts["a"].sequences
    assert sum(ledger._accounts["a"].waiting_by_rank.values()) == SLOTS - 2
    for name in (*names, *(f"w{index}" for index in range(SLOTS))):
        ledger.ended(name)
    assert ledger._sequences == 0 and not ledger._accounts and ledger.work(1) == 0


def test_the_work_of_an_engine_is_what_its_requests_still_want() -> None:
    ledger = Ledger(resolved_config(), lambda: 0.0, engines=2)
    works = {
        "a": RequestWork("", 50, num_output=20, engine=1),
        "b": RequestWork("", 7, sequences=2, num_output=10**6, engine=1),
    }
    ledger.admit(works)
    assert ledger.engine_of("a") == 1 and ledger.engine_of("c") is None
    assert (ledger.work(0), ledger.work(1)) == (0, 50 + 20 + 7 + 2 * MOST_OUTPUT)
    ledger.stepped(["a", "b"], 3, 0.0, 1)
    assert ledger.work(1) == 20 + 2 * MOST_OUTPUT
    ledger.sequence_ended("b")
    ledger.ended("a")
    assert ledger.work(1) == MOST_OUTPUT
    ledger.ended("b")
    assert (ledger.work(0), ledger.work(1)) == (0, 0)


def test_images_of_requests_that_run_count_too() -> None:
    bench = Bench(max_media_bytes=100)
    first = bench.admit(media_bytes=150)
    assert bench.refused(media_bytes=1) == "max_media_bytes"
    assert bench.refused(num_prompt=10**6) is None, "text holds nothing of it"
    bench.step(first)
    assert bench.refused(media_bytes=1) == "max_media_bytes"
    bench.ledger.ended(first)
    first = bench.admit(media_bytes=60)
    assert bench.refused(media_bytes=40) is None
    assert bench.refused(media_bytes=41) == "max_media_bytes"
    # another client has a half for itself, so both together twice the bound at most
    bench.admit(media_bytes=40)
    second = bench.admit("other", media_bytes=50)
    for name in ("other", ""):
        assert bench.refused(name, media_bytes=1) == "max_media_bytes"
    assert bench.refused("third", media_bytes=33) is None
    assert bench.refused("third", media_bytes=34) == "max_media_bytes"
    bench.ledger.ended(first)
    bench.ledger.ended(second)
    assert bench.refused("other", media_bytes=50) is None

"""Sequences that share a prompt or continue another one: groups, forks, forced tokens."""

from __future__ import annotations

import pytest

from jaxserve.request.request import Request, RequestState
from jaxserve.scheduling.group import SequenceGroup
from jaxserve.scheduling.scheduler import Scheduler
from tests.jaxserve.scheduling.fake_device import FakeDevice
from tests.jaxserve.scheduling.test_scheduler import (
    alone,
    make_request,
    names,
    simple,
    start,
    step,
)


def group_of(n: int, prompt: list[int], max_tokens: int = 9) -> list[Request]:
    """The sequences s0, s1, ... of one prompt; the first stands for all when it is added."""
    behind = {f"s{i}": make_request(f"s{i}", prompt, max_tokens) for i in range(1, n)}

    def make(name: str, seed: int, group: SequenceGroup) -> Request:
        behind[name].group = group
        return behind[name]

    group = SequenceGroup(dict.fromkeys(reversed(behind), 0), make)
    return [make_request("s0", prompt, max_tokens, group=group), *behind.values()]


def test_the_sequences_of_a_group_sample_from_one_prefill() -> None:
    scheduler, device = start(simple(max_num_seqs=4, token_budget=16, max_prefill=16))
    sequences = group_of(4, [5] * 14)
    scheduler.add(sequences[0])
    plan = step(scheduler, device)
    scheduler.check_integrity()
    assert plan.rows.lengths == [14] and plan.samples.rows == [0] * 4
    assert len({tuple(s.output_token_ids) for s in sequences}) == 1
    # pages of 4 tokens: 3 are shared, each sequence has a last one of its own
    assert scheduler.pages.pool.num_used == 3 + 4
    assert len(step(scheduler, device).forks) == 3
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert all(s.output_token_ids == alone([5] * 14, 9)[0] for s in sequences)
    assert scheduler.pages.pool.num_used == 0


def test_sequences_that_find_no_slot_compute_the_last_tokens_of_their_prompt() -> None:
    scheduler, device = start(simple(max_num_seqs=2, token_budget=16, max_prefill=16))
    sequences = group_of(5, [5] * 14, 3)
    scheduler.add(sequences[0])
    computed = []
    while scheduler.has_unfinished:
        plan = step(scheduler, device)
        computed.append(sum(plan.rows.lengths[plan.num_decode :]))
        scheduler.check_integrity()
    # 12 tokens are held: the third and the fifth compute two, the fourth forks from the third
    assert [count for count in computed if count] == [14, 2, 2]
    assert all(s.output_token_ids == alone([5] * 14, 3)[0] for s in sequences)


def test_a_sibling_does_not_overtake_who_came_before() -> None:
    scheduler, device = start(
        simple(max_num_seqs=3, page_size=1, spare_pages=6, max_prefill=24, token_budget=24)
    )
    scheduler.add(make_request("running", [4] * 12, 9))
    step(scheduler, device)
    large, sequences = make_request("large", [6] * 20, 2), group_of(2, [5] * 2, 2)
    scheduler.add(sequences[0])
    scheduler.add(large)
    sequences[0].group.next_order += 9  # it came between them, as by another policy
    plan = step(scheduler, device)
    assert names(plan) == (["running"], ["s0"])
    assert len(plan.samples) == 2, "s1 came after the one that waits for pages"


def run_to(scheduler: Scheduler, device: FakeDevice, request: Request, num_output: int) -> None:
    while len(request.output_token_ids) < num_output:
        step(scheduler, device)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_fork_goes_on_with_other_tokens_from_what_its_parent_computed(page_size: int) -> None:
    scheduler, device = start(simple(max_num_seqs=3, page_size=page_size))
    parent = make_request("parent", [5] * 7, 12)
    scheduler.add(parent)
    run_to(scheduler, device, parent, 3)
    before = list(parent.output_token_ids)
    child = make_request("child", [5] * 7, 12)
    used = scheduler.pages.pool.num_used
    assert scheduler.fork(parent, child, [3, 9])
    scheduler.check_integrity()
    assert scheduler.pages.pool.num_used - used <= 2 + (page_size == 1), "full pages are shared"
    plan = step(scheduler, device)
    assert plan.tokens[1].tolist() == [3, 9], "only these are computed"
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    forced = [*before[:-1], 3, 9]
    assert child.output_token_ids == forced + alone([5] * 7 + forced, 12 - len(forced))[0]
    assert parent.output_token_ids == alone([5] * 7, 12)[0]
    assert scheduler.pages.pool.num_used == 0


def test_a_fork_without_a_slot_or_pages_changes_nothing() -> None:
    scheduler, device = start(simple(max_num_seqs=1))
    parent = make_request("parent", [5] * 7, 12)
    scheduler.add(parent)
    with pytest.raises(ValueError, match="parent has tokens in flight"):
        scheduler.fork(parent, make_request("child", [5] * 7, 12), [3])
    run_to(scheduler, device, parent, 3)
    assert not scheduler.fork(parent, make_request("child", [5] * 7, 12), [3])
    scheduler.check_integrity()


@pytest.mark.parametrize("count", [0, 10, 17])
def test_forced_tokens_leave_room_for_one_more(count: int) -> None:
    scheduler, device = start(simple())
    request = make_request("one", [5] * 7, 12)
    scheduler.add(request)
    run_to(scheduler, device, request, 3)
    with pytest.raises(ValueError, match=f"{count} tokens make"):
        scheduler.force(request, [4] * count)
    with pytest.raises(ValueError, match=f"{count} tokens make"):
        scheduler.fork(request, make_request("child", [5] * 7, 12), [4] * count)
    scheduler.force(request, [4] * 9)
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert len(request.output_token_ids) == 12


def test_forced_tokens_take_the_place_of_what_was_sampled() -> None:
    scheduler, device = start(simple())
    request = make_request("one", [5] * 7, 12)
    scheduler.add(request)
    run_to(scheduler, device, request, 3)
    forced = [*request.output_token_ids[:-1], 4, 8, 2]
    scheduler.force(request, [4, 8, 2])
    assert request.output_token_ids == forced
    assert step(scheduler, device).rows.lengths == [3]
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert request.output_token_ids == forced + alone([5] * 7 + forced, 12 - len(forced))[0]


def holding_group(other_prompt: int = 10) -> tuple[Scheduler, FakeDevice, Request, list[Request]]:
    """A request that grows beside a group whose first sequence has ended and left 11 pages held.

    Of the 24 pages too few are free for the group's next sequence.
    """
    scheduler, device = start(
        simple(
            max_num_seqs=3,
            page_size=1,
            spare_pages=0,
            token_budget=24,
            max_prefill=24,
            max_lanes=1,
            caching=False,
        )
    )
    other = make_request("other", [6] * other_prompt, 14)
    scheduler.add(other)
    step(scheduler, device)
    sequences = group_of(2, [5] * 12, 1)
    scheduler.add(sequences[0])
    step(scheduler, device)
    step(scheduler, device)
    assert sequences[0].state is RequestState.FINISHED
    assert sequences[1].state is RequestState.WAITING
    assert sum(map(len, scheduler._held.pages())) == 11
    return scheduler, device, other, sequences


def test_what_a_group_holds_is_given_up_before_anybody_is_preempted() -> None:
    scheduler, device, other, sequences = holding_group()
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert scheduler.num_preemptions == 0
    assert other.output_token_ids == alone([6] * 10, 14)[0]
    assert sequences[1].output_token_ids == alone([5] * 12, 1)[0]


def test_what_a_group_holds_keeps_nobody_out_when_nothing_runs() -> None:
    scheduler, device, other, sequences = holding_group()
    first = make_request("first", [7] * 18, 2)
    scheduler.add(first)
    # it comes before the group, as a preempted request does, and needs more than is free
    scheduler.waiting.discard(first)
    first.order = -1
    scheduler.waiting.push(first)
    scheduler.abort(other.request_id)
    assert names(step(scheduler, device)) == ([], ["first"])
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert sequences[1].output_token_ids == alone([5] * 12, 1)[0]


def test_groups_that_hold_the_same_pages_keep_nobody_out() -> None:
    scheduler, device = start(
        simple(max_num_seqs=1, spare_pages=0, token_budget=24, max_prefill=24)
    )
    prompt = [5] * 12  # 3 of the 6 pages, of which groups hold 2

    def make(name: str, seed: int, group: SequenceGroup) -> Request:
        return make_request(name, prompt, 1, group=group)

    groups = [SequenceGroup({f"{name}1": 0}, make) for name in "ab"]
    front = [make(f"{name}0", 0, group) for name, group in zip("ab", groups)]
    for first, group in zip(front, groups):
        scheduler.add(first)
        group.next_order += 10  # its sibling comes after the one that needs all pages
        step(scheduler, device)
    assert [group.pages for group in groups] == [groups[0].pages] * 2
    large = make_request("large", [6] * 22, 2)
    scheduler.add(large)
    for _ in range(9):
        step(scheduler, device)
        scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert large.output_token_ids == alone([6] * 22, 2)[0]


def test_pages_that_others_own_too_are_not_given_up() -> None:
    scheduler, device = start(simple(max_num_seqs=2, token_budget=16, max_prefill=16))
    scheduler.add(group_of(4, [5] * 14, 9)[0])
    step(scheduler, device)
    assert scheduler._held.pages() and not scheduler._held.drop_one()
    assert scheduler._held.pages(), "its first sequence still owns them: none would be free"


def test_the_next_of_a_group_takes_over_when_the_first_is_aborted() -> None:
    scheduler, device = start(simple(max_num_seqs=4, token_budget=6, max_prefill=6))
    sequences = group_of(3, [5] * 14)
    scheduler.add(sequences[0])
    step(scheduler, device)
    scheduler.abort("s0")
    scheduler.check_integrity()
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert [s.output_token_ids for s in sequences[1:]] == [alone([5] * 14, 9)[0]] * 2


def test_forced_tokens_take_a_page_from_the_last_in_turn() -> None:
    """The oldest keeps its slot: else two that are forced by turns could preempt each other."""
    scheduler, device = start(simple(max_num_seqs=2, page_size=4, spare_pages=9))
    first, last = make_request("first", [5] * 7, 12), make_request("last", [8] * 7, 12)
    scheduler.add(first)
    scheduler.add(last)
    run_to(scheduler, device, first, 2)
    pool = scheduler.pages.pool
    taken = pool.allocate(pool.num_free)
    scheduler.force(first, [1, 2, 3, 4, 5, 6])
    assert first.slot is not None and last.slot is None
    pool.release(taken)
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()


def test_a_fork_takes_no_page_from_anybody() -> None:
    scheduler, device = start(simple(max_num_seqs=3, page_size=4, spare_pages=0))
    parent = make_request("parent", [5] * 7, 12)
    scheduler.add(parent)
    run_to(scheduler, device, parent, 2)
    pool = scheduler.pages.pool
    taken = pool.allocate(pool.num_free - 1)
    child = make_request("child", [5] * 7, 12)
    assert not scheduler.fork(parent, child, [1, 2, 3, 4, 5, 6]), "its tokens need two pages"
    assert scheduler.num_preemptions == 0 and parent.slot is not None
    pool.release(taken)
    scheduler.check_integrity()


def test_who_is_preempted_with_a_token_in_flight_begins_when_it_is_known() -> None:
    scheduler, device = start(simple(max_num_seqs=2, page_size=4, spare_pages=9))
    first, last = make_request("first", [5] * 7, 12), make_request("last", [8] * 7, 12)
    first.needs_seen_tokens = True
    scheduler.add(first)
    scheduler.add(last)
    run_to(scheduler, device, first, 2)
    plans = [scheduler.plan(), scheduler.plan()]
    tokens = [device.run(plan)[0] for plan in plans]
    scheduler.commit(plans[0], tokens[0])
    assert (first.pending, last.pending) == (0, 1)
    pool = scheduler.pages.pool
    taken = pool.allocate(pool.num_free)
    scheduler.force(first, [1, 2, 3, 4, 5, 6])
    pool.release(taken)
    later = scheduler.plan()
    assert later.rows.requests == [first] and last.slot is None
    tokens.append(device.run(later)[0])
    for plan, sampled in zip([plans[1], later], tokens[1:]):
        scheduler.commit(plan, sampled)
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert last.output_token_ids == alone([8] * 7, 12)[0]

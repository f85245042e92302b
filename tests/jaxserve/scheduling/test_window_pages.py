"""Pages that a window has passed: given back, never needed, and found where they are needed."""

from __future__ import annotations

import pytest

from jaxserve.memory.host_tier import HostTier, MoveCosts
from jaxserve.memory.page_groups import PageGroups
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.view import view_of
from tests.jaxserve.scheduling.fake_device import FakeDevice
from tests.jaxserve.scheduling.test_group import group_of
from tests.jaxserve.scheduling.test_prefix_cache import finish
from tests.jaxserve.scheduling.test_scheduler import alone, make_request, simple, start, step

ALL_WINDOWED, MIXED = PageGroups(0, 1, 5), PageGroups(1, 2, 5)
GROUPS = pytest.mark.parametrize("groups", [ALL_WINDOWED, MIXED])


def begin(groups: PageGroups, **changes) -> tuple[Scheduler, FakeDevice]:
    sizes = {"token_budget": 24, "max_prefill": 24, "page_size": 2, "spare_pages": 60}
    return start(simple(groups=groups, **sizes | changes))


@GROUPS
@pytest.mark.parametrize("overlap", [False, True])
def test_a_running_request_holds_what_its_windows_reach(groups: PageGroups, overlap: bool) -> None:
    scheduler, device = begin(groups)
    request = make_request("a", [5, 9, 3], 20)
    scheduler.add(request)
    in_flight, most = None, 0
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        ran = (plan, *device.run(plan)) if plan else None
        done, in_flight = (in_flight, ran) if overlap else (ran, None)
        if done is not None:
            scheduler.commit(*done)
        scheduler.check_integrity()
        whole = groups.num_full * -(-request.num_computed // 2)
        held = scheduler.pages.num_held(request)
        assert [slot.num_pages for slot in view_of(scheduler, str).slots] in ([held], [])
        most = max(most, held - whole)
        assert scheduler.page_stats().num_tokens <= 2 * scheduler.pages.pool.num_used
    assert request.output_token_ids == alone([5, 9, 3], 20)[0]
    assert len(request.output_token_ids) > 10, "the window must have moved"
    # at first for a window of 5, a prompt of 24 and what is in flight, but no more than 4 are known
    assert most <= groups.num_windowed * 6


def test_the_pool_serves_more_requests_when_windows_pass_pages() -> None:
    def preemptions(groups: PageGroups) -> int:
        scheduler, device = begin(groups, max_num_seqs=5, spare_pages=8)  # of 20 pages
        for name in "abcde":
            scheduler.add(make_request(name, [ord(name) % 7 + 1], 20))
        while scheduler.has_unfinished:
            step(scheduler, device)
        return scheduler.num_preemptions

    assert preemptions(PageGroups()) > 0 == preemptions(PageGroups(0, 1, 5))


@GROUPS
def test_a_long_prompt_has_pages_for_a_window_and_a_chunk_at_any_time(groups: PageGroups) -> None:
    scheduler, device = begin(groups, token_budget=6, max_prefill=6)
    prompt = [1 + place % 9 for place in range(20)]
    request = make_request("a", prompt, 4)
    scheduler.add(request)
    held = []
    for _ in range(4):
        step(scheduler, device)
        scheduler.check_integrity()
        held.append(scheduler.pages.num_held(request) - groups.num_full * 11)
    # 5 + 8 tokens; chunks begin at 6, 12 and 18 and see 4 tokens before: 1, 4 and 7 pages are past
    assert held == [groups.num_windowed * count for count in (7, 7 - 1, 10 - 4, 11 - 7)]


@GROUPS
def test_another_turn_finds_all_and_needs_the_window_alone(groups: PageGroups) -> None:
    scheduler, device = begin(groups)
    first = make_request("turn", [6] * 6, 9)
    finish(scheduler, device, first)
    told = [6] * 6 + first.output_token_ids
    assert len(told) > 9
    following = make_request("next", [*told, 4, 4], 2)
    assert finish(scheduler, device, following) == (len(told) - 1) // 2 * 2


@GROUPS
def test_a_prefix_ends_where_the_window_before_it_is_known(groups: PageGroups) -> None:
    scheduler, device = begin(groups)
    prompt = [1 + place % 9 for place in range(16)]
    finish(scheduler, device, make_request("a", prompt, 1))
    pool = scheduler.pages.pool
    pages = scheduler.pages.find(make_request("b", [*prompt, 1], 1))
    count, windowed = groups.num_groups, groups.num_full
    assert len(pages) == 8 * count
    # the next token sees 4 before it
    assert [page > 0 for page in pages[windowed::count]] == [False] * 6 + [True] * 2
    pool.index.forget(pages[7 * count + windowed])
    shorter = scheduler.pages.find(make_request("c", [*prompt, 1], 1))
    assert len(shorter) == 7 * count and shorter[windowed::count][-2] > 0
    if groups.num_full:
        pool.index.forget(pages[3 * count])
        assert len(scheduler.pages.find(make_request("d", [*prompt, 1], 1))) == 3 * count


@GROUPS
def test_the_host_gives_back_what_windows_need_and_no_more(groups: PageGroups) -> None:
    scheduler, device = begin(groups, host_pages=300, spare_pages=0)
    prompt = [1 + place % 9 for place in range(16)]
    finish(scheduler, device, make_request("a", prompt, 1))
    for number in range(4):
        finish(scheduler, device, make_request(f"{number}", [number] * 20, 2))
    assert scheduler.pages.find(make_request("b", [*prompt, 1], 1)) == []
    assert finish(scheduler, device, make_request("c", [*prompt, 1], 3)) == 16
    # the next token sees 4 before it, in two pages
    assert device.num_moves_back == 8 * groups.num_full + 2 * groups.num_windowed
    assert finish(scheduler, device, make_request("d", [*prompt, 1], 3)) == 16
    assert device.num_moves_back == 8 * groups.num_full + 2 * groups.num_windowed


@GROUPS
def test_what_windows_need_comes_back_where_that_pays_and_else_is_computed(
    groups: PageGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, device = begin(groups, host_pages=300, spare_pages=0)
    prompt = [1 + place % 9 for place in range(16)]
    finish(scheduler, device, make_request("a", prompt, 1))
    for number in range(4):
        finish(scheduler, device, make_request(f"{number}", [number] * 20, 2))
    needed, tier = 8 * groups.num_full + 2 * groups.num_windowed, scheduler.pages.pool.index._tier
    assert isinstance(tier, HostTier)
    asked: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(tier, "fetch", lambda keys, spared: asked.append((len(keys), spared)))
        scheduler.pages.fetch(make_request("b", [*prompt, 1], 1))
    assert asked == [(needed, 8 * groups.num_groups - needed)]
    tier.costs = MoveCosts(1, 1.0, 0.0)
    assert finish(scheduler, device, make_request("c", [*prompt, 1], 3)) == 0
    assert device.num_moves_back == 0 and tier.stats().num_recomputed == needed
    assert scheduler.pages.pool.num_used == 0
    finish(scheduler, device, make_request("d", [5] * 20, 2))
    finish(scheduler, device, make_request("e", [6] * 20, 2))


@pytest.mark.parametrize(("host_pages", "found", "moved"), [(12, 2, 7), (13, 10, 8), (21, 16, 11)])
def test_what_leaves_for_pages_that_come_may_take_their_place_on_the_host(
    host_pages: int, found: int, moved: int
) -> None:
    """Seven of the twelve that were wanted came back: the request begins with what it had."""
    scheduler, device = begin(MIXED, host_pages=host_pages, spare_pages=0)
    prompt = [1 + place % 9 for place in range(16)]
    finish(scheduler, device, make_request("a", prompt, 1))
    finish(scheduler, device, make_request("b", [2] * 20, 2))
    assert finish(scheduler, device, make_request("c", [*prompt, 1], 3)) == found
    assert device.num_moves_back == moved and scheduler.pages.pool.num_used == 0


@GROUPS
def test_siblings_and_forks_share_what_the_window_has_left(groups: PageGroups) -> None:
    scheduler, device = begin(groups, max_num_seqs=3, token_budget=6, max_prefill=6)
    prompt = [1 + place % 9 for place in range(15)]
    sequences = group_of(5, prompt, 5)
    scheduler.add(sequences[0])
    while len(sequences[0].output_token_ids) < 2:
        step(scheduler, device)
    child = make_request("child", prompt, 8)
    if scheduler.fork(sequences[0], child, [3, 9]):
        assert child.num_passed == sequences[0].num_passed > 0
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    assert all(s.output_token_ids == alone(prompt, 5)[0] for s in sequences)
    assert scheduler.pages.pool.num_used == 0

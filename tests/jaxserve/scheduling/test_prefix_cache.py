"""The scheduler's hits in the prefix cache; only time depends on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from jaxserve.memory.page_keys import KeySpan, key_tokens
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.request import Request
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from tests.jaxserve.scheduling.fake_device import FakeDevice
from tests.jaxserve.scheduling.test_group import group_of
from tests.jaxserve.scheduling.test_scheduler import (
    Run,
    Workload,
    alone,
    make_request,
    simple,
    start,
    step,
    workloads,
)


def finish(scheduler: Scheduler, device: FakeDevice, request: Request) -> int:
    """Run a request to its end; the prompt tokens that were found for it."""
    scheduler.add(request)
    while scheduler.has_unfinished:
        step(scheduler, device)
        scheduler.check_integrity()
    expected = alone(request.prompt_token_ids, request.stop_rule.max_tokens)[0]
    assert request.output_token_ids == expected
    assert request.num_cached is not None
    return request.num_cached


@pytest.fixture
def one() -> tuple[Scheduler, FakeDevice]:
    return start(simple(token_budget=24, max_prefill=24))  # pages of 4 tokens


@settings(max_examples=60, deadline=None)
@given(workloads)
def test_tokens_are_the_same_with_the_cache_and_without(workload: Workload) -> None:
    def outcome(caching: bool) -> dict[str, tuple[list[int], str | None]]:
        run = Run(replace(workload, caching=caching)).to_the_end()
        assert caching or not any(
            request.num_cached for request in run.requests if not request.group
        )
        ended = [r for r in run.requests if r.request_id not in run.aborted]
        return {r.request_id: (r.output_token_ids, run.reasons[r.request_id]) for r in ended}

    # when an abort comes depends on how fast its request is
    one, other = outcome(True), outcome(False)
    assert all(one[name] == other[name] for name in one.keys() & other.keys())


def test_full_pages_are_found_but_for_the_last_token(one) -> None:
    prompt = [5] * 8
    assert finish(*one, make_request("a", prompt, 2)) == 0
    assert finish(*one, make_request("b", prompt, 2)) == 4, "the last token is computed"
    assert finish(*one, make_request("c", [*prompt, 6], 2)) == 8
    assert finish(*one, make_request("d", [*prompt[:6], 7, 7, 7], 2)) == 4
    assert finish(*one, make_request("e", [7, *prompt], 2)) == 0
    pages = one[0].pages
    assert (pages.num_queried, pages.num_found) == (8 + 8 + 9 + 9 + 9, 4 + 8 + 4)


def test_what_was_generated_is_found_as_well(one) -> None:
    first = make_request("turn", [6] * 6, 9)
    finish(*one, first)
    told = [6] * 6 + first.output_token_ids
    assert len(told) > 9
    # the last token was seen when nothing else was wanted: it was not computed
    assert finish(*one, make_request("next", [*told, 4, 4], 2)) == (len(told) - 1) // 4 * 4


def test_a_running_prompt_is_found_from_the_next_step_on(one) -> None:
    scheduler, _ = one
    scheduler.add(make_request("a", [5] * 9, 9))
    step(*one)
    scheduler.add(make_request("b", [5] * 9, 9))
    plan = step(*one)
    assert plan.rows.lengths == [1, 1] and plan.uploads[0].tokens.tolist() == [5] * 8
    assert scheduler.pages.pool.num_used == 2 + 1 + 1, "they share two full pages"
    scheduler.check_integrity()


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    scheduler, device = start(simple(page_size=1, spare_pages=3, token_budget=24, max_prefill=24))
    for name in ("old", "young"):
        scheduler.add(make_request(name, [5 if name == "old" else 6] * 10, 14))
    again: list[int] = []
    while scheduler.has_unfinished:
        plan = step(scheduler, device)
        again += [
            length
            for request, length in zip(plan.rows.requests, plan.rows.lengths)
            if length > 1 and request.num_preemptions
        ]
        scheduler.check_integrity()
    assert scheduler.num_preemptions and max(again) < 10, "its oldest pages were not taken yet"


def test_a_prompt_whose_scores_are_wanted_is_computed(one) -> None:
    finish(*one, make_request("a", [5] * 9, 2))
    scored = make_request("b", [5] * 9, 2)
    scored.asked = replace(scored.asked, params=SamplingParams(prompt_logprobs=1))
    assert finish(*one, scored) == 0
    assert one[0].pages.num_queried == 9


def test_a_salt_and_what_features_say_keep_requests_apart(one) -> None:
    found = []
    for salt, extras in [(None, ()), ("s", ()), ("t", ()), ("s", ()), ("s", ("a=1",)), (None, ())]:
        request = make_request(f"{len(found)}", [5] * 9, 2)
        request.asked, request.cache_extras = replace(request.asked, cache_salt=salt), extras
        found.append(finish(*one, request))
    assert found == [0, 0, 0, 8, 0, 8]


def test_places_that_depend_on_more_than_ids_are_told_apart_and_what_is_before_them_is_found(one):
    """The device's tokens stand for embeddings here: the host has no ids of them."""
    found = []
    for content, image, tail in [
        (b"one", 7, 6),
        (b"other", 8, 6),
        (b"one", 7, 6),
        (b"one", 7, 9),
        (b"third", 7, 6),
    ]:
        request = make_request(f"{len(found)}", [5] * 6 + [image] * 5 + [tail] * 4, 2)
        ids = [5] * 6 + [-1] * 5 + [tail] * 4
        request.key_tokens = key_tokens(ids, "f", [KeySpan(6, 5, content)])
        found.append(finish(*one, request))
    found.append(finish(*one, make_request("text", [5] * 6 + [3] * 9, 2)))
    assert found == [0, 4, 12, 8, 4, 4], "pages are of 4 tokens"


def test_a_reset_forgets_what_was_computed_before_it(one) -> None:
    scheduler, _ = one
    finish(*one, make_request("a", [5] * 9, 2))
    running, waiting = make_request("running", [6] * 9, 9), make_request("waiting", [6] * 9, 9)
    scheduler.add(running)
    step(*one)
    scheduler.add(waiting)
    scheduler.pages.find(waiting)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    assert scheduler.page_stats().num_cached == scheduler.page_stats().num_reclaimable == 0
    assert finish(*one, make_request("b", [5] * 9, 2)) == 0
    assert waiting.num_cached == 0, "the one that ran was computed before"
    assert finish(*one, make_request("c", [5] * 9, 2)) == 8
    running_tokens = [*running.prompt_token_ids, *running.output_token_ids]
    again = make_request("d", running_tokens[:13], 2)
    assert finish(*one, again) <= 12


def test_without_the_cache_nothing_is_kept() -> None:
    one = start(simple(token_budget=24, max_prefill=24, caching=False))
    for name in "ab":
        assert finish(*one, make_request(name, [5] * 9, 2)) == 0
    stats = one[0].page_stats()
    assert (stats.num_cached, stats.num_queried) == (0, 0)


def test_pages_in_use_are_never_taken_and_the_cache_gives_way_to_new_prompts() -> None:
    scheduler, device = start(simple(spare_pages=0, token_budget=24, max_prefill=24))
    for number in range(12):  # 6 pages in all
        request = make_request(str(number), [number % 5 + 3] * (8 + number), 3)
        finish(scheduler, device, request)
    assert scheduler.page_stats().num_active == 0


def test_a_tier_keeps_what_the_pool_has_no_room_for() -> None:
    scheduler, device = start(simple(spare_pages=0, token_budget=24, max_prefill=24, host_pages=20))
    prompts = [[number + 3] * 13 for number in range(5)]  # of 6 pages each wants 4
    for again in (False, True):
        for number, prompt in enumerate(prompts):
            found = finish(scheduler, device, make_request(f"{number} {again}", prompt, 2))
            assert found == (12 if again else 0), "all full pages"
    assert device.num_moves_back >= 4 * 3
    scheduler.reset_prefix_cache()
    assert finish(scheduler, device, make_request("reset", prompts[0], 2)) == 0


def test_what_comes_back_is_there_for_others_in_the_same_step() -> None:
    one = start(simple(spare_pages=0, token_budget=24, max_prefill=24, host_pages=20))
    finish(*one, make_request("a", [5] * 9, 2))
    for number in range(3):  # they take its pages
        finish(*one, make_request(str(number), [6 + number] * 20, 2))
    for name in "bc":
        one[0].add(make_request(name, [5] * 9, 2))
    plan = step(*one)
    back = [move for move in plan.moves if not move.leaves]
    assert len(back) == 2 and [len(upload.tokens) for upload in plan.uploads] == [8, 8]
    assert plan.uploads[0].pages == plan.uploads[1].pages == [move.page for move in back]


def test_a_fork_reads_its_page_before_another_one_comes_into_it() -> None:
    one = start(
        simple(max_num_seqs=3, spare_pages=2, token_budget=24, max_prefill=24, host_pages=20)
    )
    scheduler = one[0]
    again = make_request("again", [7] * 9, 3)
    finish(*one, make_request("a", again.prompt_token_ids, 2))
    for number in range(3):  # they take its pages
        finish(*one, make_request(str(number), [6 - number] * 20, 2))
    front, sibling = group_of(2, [8] * 14)
    scheduler.add(front)
    step(*one)
    scheduler.abort("s0")
    scheduler.add(again)
    plan = step(*one)
    assert plan.forks[0].source_pages[0] in [move.page for move in plan.moves if not move.leaves]
    while scheduler.has_unfinished:
        step(*one)
    for request in (again, sibling):
        rule = request.stop_rule
        assert request.output_token_ids == alone(request.prompt_token_ids, rule.max_tokens)[0]


def scenario() -> tuple[Scheduler, FakeDevice, list[Request]]:
    """Chunked prefills, a hit, a group with siblings behind, and too few pages for all."""
    scheduler, device = start(
        simple(max_num_seqs=3, page_size=2, spare_pages=4, token_budget=7, max_prefill=7)
    )
    group = group_of(4, [5] * 11, 5)
    found = make_request("found", [5] * 11 + [6], 8)
    plain = make_request("plain", [8] * 9, 12)
    return scheduler, device, [group[0], plain, found, *group[1:]]


NUM_POINTS = 4  # of a step: before its plan, before its run, before its commit, after it


def drive(
    scheduler: Scheduler, device: FakeDevice, requests: list[Request], at: int, who: str
) -> int:
    """Run with overlap, abort at a point; returns how many points there were."""
    point, steps = 0, 0
    in_flight: tuple[StepPlan, tuple[list[int], list[int]]] | None = None

    def passed() -> None:
        nonlocal point
        if point == at:
            scheduler.abort(who)
            scheduler.check_integrity()
        point += 1

    for request in requests[:2]:
        scheduler.add(request)
    while scheduler.has_unfinished or in_flight:
        steps += 1
        if steps == 3:
            scheduler.add(requests[2])
        passed()
        plan = scheduler.plan()
        passed()
        dispatched = (plan, device.run(plan)) if plan else None
        passed()
        if in_flight:
            scheduler.commit(in_flight[0], in_flight[1][0])
        passed()
        in_flight = dispatched
        scheduler.check_integrity()
        assert steps < 500
    return point


@pytest.mark.parametrize("who", ["s0", "s1", "s3", "plain", "found"])
def test_an_abort_at_any_point_of_a_life_frees_everything(who: str) -> None:
    points, ended = drive(*scenario(), at=-1, who=who), 0
    for at in range(points):
        scheduler, device, requests = scenario()
        drive(scheduler, device, requests, at, who)
        stats = scheduler.page_stats()
        assert stats.num_active == 0 and not scheduler.running and not len(scheduler.waiting)
        for request in requests:
            expected = alone(request.prompt_token_ids, request.stop_rule.max_tokens)[0]
            if request.request_id == who:
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
                ended += len(request.output_token_ids) < len(expected)
            else:
                assert request.output_token_ids == expected
    assert ended > points // 4


def test_a_request_that_reads_nothing_leaves_its_pages_to_others(one) -> None:
    prompt = list(range(10))
    params = SamplingParams(skip_reading_prefix_cache=True)
    for name, asked, found in (("a", None, 0), ("b", params, 0), ("c", None, 8)):
        request = make_request(name, prompt, 4)
        if asked is not None:
            request.asked = replace(request.asked, params=asked)
        assert finish(*one, request) == found

"""A request's time: it ends in time wherever it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.boundary.messages import StepOutput
from jaxserve.client.deadlines import TIDY, Deadlines
from jaxserve.client.engine_client import LocalClient
from jaxserve.errors import QueueFullError, ValidationError
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import RequestOutput
from jaxserve.params.structured_outputs_params import Thoughts
from jaxserve.request.queueing import Queueing
from jaxserve.tokenization.tokenizer import Tokenizer
from tests.jaxserve.boundary.test_messages import PAGE_SIZE, SLOTS, VOCAB, make_engine
from tests.resolved_config import resolved_config

TAGS = Thoughts("<t>", "</t>", is_open=True)


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(ClientClock, "now", lambda self: clock.now)
    yield clock


def make_client(
    kind: type[LocalClient] = LocalClient, tokenizer: Tokenizer | None = None, **settings: Any
) -> LocalClient:
    """A client of an engine on the device in pure Python, three slots and 44 tokens of pages."""
    config = resolved_config(max_model_len=24, max_num_seqs=SLOTS, block_size=PAGE_SIZE, **settings)
    model = SimpleNamespace(
        vocab_size=VOCAB, hidden_size=4, eos_token_ids=(), labels=(), images=None
    )
    loaded: Any = SimpleNamespace(
        engine=make_engine(),
        decided=SimpleNamespace(config=config, model=model, model_path=""),
        tokenizer=tokenizer,
        page_bytes=PAGE_SIZE,
    )
    return kind(loaded)


def stub_engine(told: list[StepOutput]) -> Any:
    """What says so much in its steps, whatever it is sent."""
    return SimpleNamespace(
        handle=lambda message: None,
        step=lambda: told.pop(0),
        stats=make_engine().stats,
    )


def add(client: LocalClient, name: str, size: int, timeout: float | None, n: int = 1) -> None:
    params = SamplingParams(n=n, max_tokens=15, ignore_eos=True, detokenize=False)
    turn = Queueing(100.0, 0, timeout)
    client.add(client.prepare([int(name)] * size, params, name, turn))


def finish(client: LocalClient) -> dict[str, RequestOutput]:
    found = {}
    while client.has_work:
        for output in client.outputs():
            if output.finished:
                assert output.request_id not in found, "it ends once"
                found[output.request_id] = output
    client.engine.scheduler.check_integrity()
    assert client.engine.scheduler.pages.pool.num_used == 0
    return found


def reasons(output: RequestOutput) -> list[tuple[str | None, Any]]:
    return [(one.finish_reason, one.stop_reason) for one in output.outputs]


@pytest.mark.parametrize("steps", range(14))
def test_it_ends_at_every_point_of_its_life(clock: Clock, steps: int) -> None:
    """Waiting, computing its prompt, generating, preempted: 0 and 1 crowd 2 and 3 out."""
    client = make_client()
    for name in "0123":
        add(client, name, 10, 5.0 if name in "23" else None)
    ended: list[RequestOutput] = []
    for _ in range(steps):
        ended += [output for output in client.outputs() if output.finished]
    assert not ended
    clock.now = 104.9
    ended += [output for output in client.outputs() if output.finished]
    assert not ended
    clock.now = 105.0
    preempted = [r.num_preemptions for r in client.engine.scheduler.waiting.requests()]
    assert steps < 12 or sum(preempted) > 0, "some steps are those in which one has lost its slot"
    ended = [output for output in client.outputs() if output.finished]
    assert sorted(output.request_id for output in ended) == ["2", "3"]
    assert all(reasons(output) == [("abort", "timeout")] for output in ended)
    assert all(len(output.outputs[0].token_ids) <= 15 for output in ended)
    rest = finish(client)
    assert sorted(rest) == ["0", "1"]
    assert all(reasons(output) == [("length", None)] for output in rest.values())
    labels = {"model_name": "m", "engine": "0", "finished_reason": "timeout"}
    assert client.metrics.registry.get_sample_value("jaxserve:request_success_total", labels) == 2


def test_all_sequences_of_a_request_end_and_those_that_were_done_stay_so(clock: Clock) -> None:
    client = make_client()
    add(client, "1", 6, 5.0, n=5)
    for _ in range(20):
        client.outputs()
    clock.now = 106.0
    (output,) = [output for output in client.outputs() if output.finished]
    found = reasons(output)
    assert set(found) == {("length", None), ("abort", "timeout")}
    assert not finish(client)


def test_the_time_of_an_earlier_request_of_the_same_id_is_over_with_it(clock: Clock) -> None:
    client = make_client()
    add(client, "1", 3, 5.0)
    client.abort("1")
    add(client, "1", 3, None)
    clock.now = 200.0
    assert reasons(finish(client)["1"]) == [("length", None)]


def test_times_of_those_that_have_ended_are_not_kept() -> None:
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.add(str(index), 1e6 + index)
        if index >= 10:
            deadlines.discard(str(index))
    assert len(deadlines._heap) <= 2 * 10 + TIDY + 1
    assert deadlines.due(1e6 + 4) == [*"01234"] and deadlines.due(1e7) == [*"56789"]
    assert not deadlines


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), True, "5"])
def test_times_that_cannot_be(timeout: Any) -> None:
    with pytest.raises(ValidationError, match="timeout"):
        add(make_client(), "1", 3, timeout)


@pytest.mark.parametrize("policy", ["fcfs", "length"])
def test_a_priority_that_nobody_would_heed_is_refused(policy: str) -> None:
    client = make_client(scheduling_policy=policy)
    with pytest.raises(ValidationError, match=f"priority=-1 .*{policy}"):
        client.prepare([1], SamplingParams(), "0", Queueing(0.0, -1))
    urgent = make_client(scheduling_policy="priority")
    assert urgent.prepare([1], SamplingParams(), "0", Queueing(0.0, -1)).group.queueing.priority < 0


def test_a_client_refuses_and_counts_what_the_queue_has_no_room_for(clock: Clock) -> None:
    client = make_client(max_num_queued_reqs=2)
    add(client, "0", 3, None)
    add(client, "1", 3, None)
    with pytest.raises(QueueFullError, match="max_num_queued_reqs"):
        add(client, "2", 3, None)
    with pytest.raises(QueueFullError):
        client.check_room()
    labels = {"model_name": "m", "engine": "0", "reason": "max_num_queued_reqs"}
    refused = "jaxserve:admission_rejections_total"
    assert client.metrics.registry.get_sample_value(refused, labels) == 2
    client.abort("1")
    add(client, "2", 3, None)
    client.outputs()
    client.check_room(2)
    assert sorted(finish(client)) == ["0", "2"]


class Waiting(LocalClient):
    """It ends requests that have waited for too long, as a server's client does."""

    refuses_late = True


def test_a_wait_counts_from_the_queue_and_not_from_the_request_s_arrival(clock: Clock) -> None:
    client = make_client(Waiting, max_queue_wait=1.0)
    clock.now = 104.0  # they came at 100 and have been tokenised for four seconds
    for name in "012":
        add(client, name, 3, None)
    client.outputs()
    add(client, "3", 3, None)
    assert client.next_deadline() == 105.0
    clock.now = 104.9
    client.outputs()
    assert not client.take_failures() and client.ledger.is_admitted("3")
    clock.now = 105.0
    client.outputs()
    (failure,) = client.take_failures().values()
    assert "the request had no first step within 1 s" in str(failure)
    assert isinstance(failure, QueueFullError) and not client.ledger.is_admitted("3")
    assert client.next_deadline() is None


def test_the_wait_for_a_grammar_is_none_for_the_queue(clock: Clock) -> None:
    client = make_client(Waiting, max_queue_wait=1.0)
    told: list[StepOutput] = []
    client.engine = stub_engine(told)
    params = SamplingParams(max_tokens=15, detokenize=False)
    plain = client.prepare([1, 2, 3], params, "0", Queueing(100.0))
    for group in (replace(plain.group, grammar="start: x"), replace(plain.group, thoughts=TAGS)):
        name, first = group.sequence_ids[0], {"stats": client.stats()}
        client.add(replace(plain, group=group))
        assert client.next_deadline() is None and client.ledger._sequences == 0
        clock.now += 50.0
        told.append(StepOutput([], [], {}, {}, {}, {}, **first, queued=["other", name]))
        client.outputs()
        assert client.next_deadline() == clock.now + 1.0 and client.ledger._sequences == 1
        due, clock.now = clock.now + 1.0, clock.now + 0.5
        told.append(StepOutput([], [], {}, {}, {}, {}, **first, queued=[name]))
        client.outputs()
        assert client.next_deadline() == due, "once: another engine compiles it again"
        clock.now = due
        told.append(StepOutput([], [], {}, {}, {}, {}, **first))
        client.outputs()
        assert list(client.take_failures()) == ["0"]


@pytest.mark.parametrize("times", [[5.0, 7.0, 9.0], [9.0, 7.0, 5.0]])
def test_the_next_time_is_that_of_a_request_that_lives(times: list[float]) -> None:
    deadlines = Deadlines()
    for name, time in zip("abc", times):
        deadlines.add(name, time)
    deadlines.add("d", 6.0)
    deadlines.add("d", 8.0)  # another of the same id
    deadlines.discard("abc"[times.index(5.0)])
    assert deadlines.next == 7.0 and deadlines.due(6.9) == []
    deadlines.discard("b")
    assert deadlines.next == 8.0
    for name in "abcd":
        deadlines.discard(name)
    assert deadlines.next is None

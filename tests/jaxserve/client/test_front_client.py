"""A front's client: what it sends to the server, and what becomes of the server's answers."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.boundary.front_messages import (
    AddCall,
    EngineStanding,
    Left,
    RequestEnd,
    RequestFailure,
    Stopped,
)
from jaxserve.boundary.messages import Body, EngineStats, StepOutput
from jaxserve.boundary.step_times import StepTimes
from jaxserve.client import front_client
from jaxserve.client.front_client import FrontClient, error_of, failure_of
from jaxserve.errors import (
    EngineDeadError,
    JaxServeError,
    PausedError,
    QueueFullError,
    ShutdownError,
    ValidationError,
)
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import TIMEOUT
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.processes.wire import ModelSizes, Ready
from tests.resolved_config import resolved_config

FOLDER = str(bundled_model_path())


class Front:
    def __init__(self) -> None:
        self.sent: list[Body] = []
        self.refused: list[str] = []
        config = resolved_config(model=FOLDER, max_num_seqs=4, max_queue_wait=1.0)
        self.client = FrontClient(
            config.asked, ClientClock(), lambda: None, self.sent.append, self.refused.append
        )
        sizes = ModelSizes(1024, 8, 1, (), (), None)
        self.client.load(Ready(config, sizes, FOLDER, FOLDER, 64), "3")
        self.client.take(EngineStanding("ok"))

    def prepared(self, name: str, **params: Any) -> Any:
        told = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.DELTA, **params)
        return self.client.inputs.prepare([5, 6, 7], told, name)

    def step(self, ids: list[str], tokens: list[int]) -> list[Any]:
        stats = EngineStats(0, 0, 0.0, 0, 0, 0, StepTimes())
        self.client.take(StepOutput(ids, tokens, {}, {}, {}, {}, stats))
        return self.client.outputs()


@pytest.fixture
def front() -> Front:
    return Front()


def test_a_call_is_sent_once_all_its_requests_are_begun(front: Front) -> None:
    call = [front.prepared("a"), front.prepared("b")]
    front.client.admit(call)
    front.client.add(call[0])
    alone = front.prepared("c")
    front.client.add(alone)
    assert front.sent == [AddCall(["c"], [alone.group], [[]])]
    front.client.add(call[1])
    assert front.sent[1:] == [AddCall(["a", "b"], [one.group for one in call], [[], []])]
    ids = [name for one in (*call, alone) for name in one.group.sequence_ids]
    assert ids == ["3:0.0", "3:1.0", "3:2.0"], "they tell the front, and are no other's"


def test_text_is_made_here_and_a_stop_string_ends_the_sequence(front: Front) -> None:
    tokenizer = front.client.tokenizer
    first, second = tokenizer.encode("ab cd", add_special_tokens=False)[:2]
    prepared = front.prepared("a", stop=[tokenizer.decode([first, second])[-1]])
    front.client.add(prepared)
    (name,) = prepared.group.sequence_ids
    outputs = front.step([name], [first]) + front.step([name], [second])
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "stop"
    assert front.sent[1:] == [Stopped([name])]
    assert not front.client.has_work


def test_a_client_that_leaves_is_told_of(front: Front) -> None:
    front.client.add(front.prepared("a"))
    front.client.drop("a")
    front.client.drop("a")
    assert front.sent[1:] == [Left("a")]
    assert front.step(["3:0.0"], [5]) == [], "what was on its way is passed over"


def test_the_server_ends_a_request_with_what_it_has(front: Front) -> None:
    front.client.add(front.prepared("a"))
    front.step(["3:0.0"], [5])
    front.client.take(RequestEnd("a", TIMEOUT))
    (output,) = front.client.outputs()
    assert output.finished and output.outputs[0].stop_reason == TIMEOUT
    assert front.sent[1:] == [], "it knows"


ERRORS = [
    QueueFullError("max_queue_wait", "too long", 2.5),
    PausedError("asleep"),
    ShutdownError("going"),
    EngineDeadError("gone"),
    ValidationError("bad", [1], "good"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_as_they_were(front: Front, error: Exception) -> None:
    front.client.add(front.prepared("a"))
    front.client.take(failure_of("a", error))
    assert front.client.outputs() == []
    found = front.client.take_failures()["a"]
    assert type(found) is type(error) and str(found) == str(error)
    assert getattr(found, "retry_after", 0) == getattr(error, "retry_after", 0)
    assert not front.client.has_work and not front.client.ledger.is_admitted("a")


def test_an_error_of_a_request_that_has_ended_is_passed_over(front: Front) -> None:
    front.client.add(front.prepared("a"))
    front.client.drop("a")
    front.client.take(failure_of("a", JaxServeError("late")))
    assert front.client.outputs() == [] and not front.client.take_failures()


def test_how_long_requests_wait_is_the_servers_to_judge(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front.client.ledger, "predicted_wait", lambda *_: 99.0)
    front.client.check_room()
    front.client.add(front.prepared("a"))


def test_an_error_of_no_kind_that_clients_know_is_internal() -> None:
    found = error_of(RequestFailure("a", "KeyError", "x"))
    assert type(found) is JaxServeError


def test_what_any_request_would_be_told_is_told_here(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.client.add(front.prepared("a"))
    full = QueueFullError("max_num_queued_reqs", "9 wait", 2.0)
    front.client.take(failure_of("a", full, "key:k"))
    front.client.outputs()
    with pytest.raises(QueueFullError) as error:
        front.client.check_room("key:k")
    assert str(error.value) == str(full) and front.refused == ["max_num_queued_reqs"]
    front.client.check_room("key:other")
    now = front.client._clock.now()
    monkeypatch.setattr(front.client._clock, "now", lambda: now + front_client.FULL_S + 1)
    front.client.check_room("key:k")


def test_whether_the_engine_serves_is_the_servers_word(front: Front) -> None:
    client = front.client
    assert client.is_ready and not client.is_restarting and client.silence is None
    client.take(EngineStanding("ok", "", 3, 0.5))
    assert (client.stats().num_waiting, client.stats().page_usage) == (3, 0.5)
    unbound = FrontClient(client.asked, ClientClock(), lambda: None, lambda _: None, print)
    unbound.take(EngineStanding("ok"))
    assert not unbound.is_ready, "what it is has not been told"
    client.take(EngineStanding("restarting"))
    assert client.is_restarting and not client.is_ready and not client.is_dead
    client.take(EngineStanding("silent", "no step"))
    assert client.is_ready and client.silence == "no step"
    client.take(EngineStanding("paused", "asleep"))
    assert client.refusal == "asleep"
    client.take(EngineStanding("dead", "it died too often"))
    with pytest.raises(EngineDeadError, match="it died too often"):
        client.outputs()

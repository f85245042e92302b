"""The life of a request is told from what the engine said of it, and memory is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.boundary.messages import AddGroup
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.engine.loop import Engine
from jaxserve.memory.manager import PageManager
from jaxserve.observability import request_lives
from jaxserve.observability.request_lives import MOST_EVENTS, RequestLives
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits
from tests.jaxserve.observability.test_step_clock import Clock, SimulatedDevice
from tests.jaxserve.requests import make_request


def prepared(name: str, prompt: int = 3, max_tokens: int = 40, n: int = 1) -> PreparedRequest:
    rule = StopRule(frozenset(), frozenset(), 0, max_tokens)
    ids = [f"{name}.{index}" for index in range(n)]
    params = SamplingParams(n=n, temperature=1.0)
    turn = Queueing(100.0)
    group = AddGroup(ids, [0] * n, [*range(3, 3 + prompt)], params, rule, [], turn)
    return PreparedRequest(f"r{name}", None, params, group)


def output(name: str, tokens: int) -> RequestOutput:
    times = RequestMetrics(100.0, 100.5, None, 101.0, 103.0, 103.0)
    done = CompletionOutput(0, "", [7] * tokens, finish_reason="length")
    return RequestOutput(name, None, [3], [done], True, None, times, 0)


class Run:
    """An engine on a simulated device, whose requests are remembered."""

    def __init__(self, monkeypatch, *, pages: int = 20, slots: int = 2):
        from jaxserve.observability import step_clock

        monkeypatch.setattr(step_clock, "monotonic", clock := Clock())
        self.scheduler = Scheduler(SchedulerLimits(slots, 16, 16, 4, 64), PageManager(pages, 16))
        self.engine = Engine(self.scheduler, SimulatedDevice(clock), overlap=True)
        self.lives = RequestLives()
        self.engine.on_dispatch = self.lives.planned

    def add(self, request: PreparedRequest) -> None:
        self.engine.handle(request.group)
        self.lives.added(request)

    def finish(self) -> None:
        while self.engine.has_work:
            self.lives.took(self.engine.step(), 100.0)


def test_chunks_of_a_long_prompt_and_the_last_step(monkeypatch):
    run = Run(monkeypatch)
    run.add(prepared("0", prompt=40, max_tokens=3))
    run.finish()
    run.lives.ended([output("r0", 3)])
    life = run.lives.find("r0")
    (one,) = life.sequences.values()
    assert [(c.step, c.start, c.length) for c in one.chunks] == [
        (0, 0, 16),
        (1, 16, 16),
        (2, 32, 8),
    ]
    assert (one.last_step, one.num_tokens, life.finish_reasons) == (4, 3, ["length"])
    text = str(life)
    assert "request r0: 40 prompt tokens" in text and "step 1: computed tokens 16 to 31" in text
    assert "3 tokens generated, the last in step 4" in text and "ended: length" in text
    assert "first token to last token: 2000.00 ms" in text


def test_what_the_prefix_cache_had(monkeypatch):
    run = Run(monkeypatch)
    for name in ("0", "1"):
        run.add(prepared(name, prompt=40, max_tokens=2))
        run.finish()
    life = run.lives.find("r1")
    assert life.num_cached == 32 and "32 of them from the prefix cache" in str(life)
    assert life.sequences["1.0"].chunks[0].start == 32
    assert "has not ended" in str(life)  # no output of it has come


def test_a_preemption_and_what_is_computed_again(monkeypatch):
    run = Run(monkeypatch, pages=5)
    for name in ("0", "1"):
        run.add(prepared(name, max_tokens=40))
    run.finish()
    one = run.lives.find("r1").sequences["1.0"]
    assert one.num_preemptions == 1 and len(one.chunks) > 1
    assert one.chunks[-1].step > one.preemptions[0].step
    assert f"step {one.preemptions[0].step}: preempted" in str(run.lives.find("r1"))


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(request_lives, "MOST_REQUESTS", 3)
    lives = RequestLives()
    for name in range(10):
        lives.added(prepared(str(name), n=200))
    assert len(lives) == 3 and lives.find("r6") is None and len(lives.snapshot()) == 3
    assert len(lives._by_sequence) == sum(len(life.sequences) for life in lives.snapshot())
    assert max(len(life.sequences) for life in lives.snapshot()) < 200

    last = prepared("9")
    request = make_request("9.0", [3], last.params, last.group.stop_rule)
    plan = StepPlan(tokens={0: np.zeros(1, np.int32)})
    plan.rows.requests, plan.rows.starts, plan.rows.lengths = [request], [0], [1]
    for number in range(MOST_EVENTS + 5):
        lives.planned(number, plan)
    one = lives.find("r9").sequences["9.0"]
    assert len(one.chunks) == MOST_EVENTS and one.num_chunks == MOST_EVENTS + 5
    assert "and 5 more chunks" in str(lives.find("r9"))


def test_an_id_may_come_again():
    lives = RequestLives()
    for name in ("0", "1"):
        request = prepared(name)
        lives.added(PreparedRequest("same", None, request.params, request.group))
    assert len(lives) == 1 and list(lives.find("same").sequences) == ["1.0"]
    assert lives.find("other") is None


@pytest.mark.parametrize("finished", [False, True])
def test_only_last_outputs_end_a_request(finished):
    lives = RequestLives()
    lives.added(prepared("0"))
    out = output("r0", 2)
    out.finished = finished
    lives.ended([out])
    assert (lives.find("r0").finished == 103.0) is finished

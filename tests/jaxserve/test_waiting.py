"""Thousands of waiting requests: the memory of each, and that no code goes through all."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.boundary.messages import Abort, StepOutput
from jaxserve.client import live_request, output_processor
from jaxserve.client.input_processor import InputProcessor
from jaxserve.client.output_processor import OutputProcessor
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.step_clock import ClientClock
from jaxserve.params.sampling_params import RequestOutputKind
from jaxserve.request.request import Request
from jaxserve.scheduling.policies import FirstComeFirstServed
from tests.command_line import output_of
from tests.jaxserve.boundary.test_messages import SLOTS, VOCAB, make_engine
from tests.resolved_config import resolved_config

PROMPT = [5] * 20
BYTES = 2176  # of one request, beside its tokens and the parameters that its caller made


class System:
    """Engine and client, with nothing between them."""

    def __init__(self) -> None:
        model: Any = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(3,), labels=(), images=None)
        self.engine = make_engine()
        self.inputs = InputProcessor(resolved_config(max_model_len=24), model, None)
        self.outputs = OutputProcessor(None, Metrics("m"), ClientClock())

    def add(self, name: str, params: SamplingParams, prompt: list[int] = PROMPT) -> list[str]:
        prepared = self.inputs.prepare(prompt, params, name)
        self.engine.handle(prepared.group)
        self.outputs.add(prepared)
        return prepared.group.sequence_ids

    def step(self) -> StepOutput:
        body = self.engine.step()
        self.outputs.process(body)
        return body


def test_a_request_that_waits_holds_two_kilobytes_and_an_eighth_beside_its_tokens() -> None:
    """In a process of its own: what other tests do to a class makes its instances larger."""
    program = "from benchmarks.waiting_requests import bytes_each; print(bytes_each(1000))"
    assert float(output_of("-c", program)) < BYTES


def test_a_step_does_not_go_through_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    key = FirstComeFirstServed.key

    def counted(self: Any, request: Any) -> int:
        nonlocal looked
        looked += 1
        return key(self, request)

    monkeypatch.setattr(FirstComeFirstServed, "key", counted)

    def looks(waiting: int) -> int:
        nonlocal looked
        system = System()
        for index in range(waiting):
            system.add(f"r{index}", SamplingParams(max_tokens=4))
        looked = 0
        for _ in range(20):
            system.step()
        return looked

    few = looks(100)
    assert 0 < few == looks(2000)


def test_sequences_of_a_large_group_are_made_at_their_turn() -> None:
    gc.freeze()  # what other tests have left is not looked through
    system, n = System(), 16384
    params = SamplingParams(n=n, max_tokens=2, output_kind=RequestOutputKind.DELTA)
    ids = system.add("many", params, [5, 6])
    group = system.engine.scheduler.waiting.requests()[0].group
    assert group is not None and group.num_behind == len([*group.behind]) == n - 1
    system.add("other", SamplingParams(max_tokens=4), [7])
    told: set[str] = set()
    for _ in range(50):
        told.update(system.step().sequence_ids)
    assert len(told) > 2 * SLOTS
    live = [one for one in gc.get_objects() if isinstance(one, Request) and one.group is group]
    assert len(live) <= SLOTS + 1, "beside those that run, the next one"
    output, ended = system.outputs.abort("many")
    assert output is not None and len(output.outputs) == len(ended) > n - 100
    assert {one.finish_reason for one in output.outputs} == {"abort"}
    assert set(ended) <= set(ids)
    system.engine.handle(Abort(ended))
    steps = 0
    while system.engine.has_work:
        system.step()
        steps += 1
    assert steps < 40 and not system.outputs.has_live
    system.engine.scheduler.check_integrity()


def test_a_large_group_whose_caller_has_gone_ends_without_an_output_each(monkeypatch) -> None:
    system, made = System(), []
    params = SamplingParams(n=16384, max_tokens=4, detokenize=False)
    ids = system.add("many", params, [5, 6])
    told: set[str] = set()
    while len(told) < SLOTS:
        told.update(system.step().sequence_ids)
    for module in (output_processor, live_request):
        monkeypatch.setattr(module, "empty_output", lambda *given: made.append(given))
    ended = system.outputs.drop("many")
    assert not made and not system.outputs.has_live and system.outputs.drop("many") == []
    assert set(ids) - set(ended) <= told and len(ended) > 16384 - 100
    system.engine.handle(Abort(ended))
    while system.engine.has_work:
        system.step()
    system.engine.scheduler.check_integrity()

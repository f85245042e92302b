"""Client and engine with nothing between them but bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.boundary.messages import (
    Abort,
    Action,
    AddGroup,
    Body,
    Control,
    FirstSteps,
    Hypothesis,
    StepOutput,
)
from jaxserve.boundary.prompt_spans import NO_ID, PromptSpan
from jaxserve.boundary.reports import POOLING
from jaxserve.engine.loop import Engine
from jaxserve.errors import EngineDeadError, MessageError
from jaxserve.execution.features import Facts
from jaxserve.execution.features.mask import Mask
from jaxserve.execution.results import PackedStep, StepInFlight, StepResult
from jaxserve.execution.row_packer import StepNeeds
from jaxserve.memory.manager import PageManager
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.processes import wire
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import End, FinishReason, StopRule
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits
from tests.jaxserve.codec import decode, encode
from tests.jaxserve.scheduling.fake_device import FakeDevice, next_token

PAGES, PAGE_SIZE, SLOTS, VOCAB = 12, 4, 3, 11
SECONDS = 0.0  # of arrival: the engine orders by the messages


class FakeRunner:
    """Runs steps on the device in pure Python."""

    programs = SimpleNamespace(programs=[])
    ropes = ()
    write_rows = None
    put_state = None

    def __init__(self) -> None:
        self.features = (Mask(Facts(VOCAB, 1)),)
        self.device = FakeDevice(num_pages=PAGES, page_size=PAGE_SIZE, num_slots=SLOTS, vocab=VOCAB)
        self.death: str | None = None

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)

    def pack(self, plan: Any) -> None:
        """Nothing to do."""

    def dispatch(self, plan: Any, packed: None) -> StepInFlight:
        tokens: Any = SimpleNamespace(tokens=self.device.run(plan)[0], is_ready=lambda: True)
        nothing: Any = None
        step = PackedStep(nothing, StepNeeds(frozenset(), [], [], []), nothing)
        return StepInFlight(plan, step, tokens, {})

    def fetch(self, step: Any) -> StepResult:
        return StepResult(step.result.tokens, None, {}, {})

    def close(self) -> None:
        self.death = "closed"


def make_engine(*, overlap: bool = True) -> Engine:
    runner: Any = FakeRunner()
    limits = SchedulerLimits(SLOTS, 8, 8, 3, 24)
    return Engine(Scheduler(limits, PageManager(PAGES, PAGE_SIZE)), runner, overlap=overlap)


def group(
    number: int, prompt: list[int], n: int, max_tokens: int, eos: frozenset[int] = frozenset({3})
) -> AddGroup:
    ids = [f"{number}.{index}" for index in range(n)]
    rule = StopRule(eos, frozenset(), 0, max_tokens)
    params = SamplingParams(logit_bias={1: 0.5}, seed=number)
    turn = Queueing(SECONDS, client=f"client {number % 3}")
    return AddGroup(ids, [number + i for i in range(n)], prompt, params, rule, [[4, 5]], turn)


Log = list[bytes | None]  # what was sent; None: a step was run


def random_log(seed: int) -> Log:
    """Requests and aborts between steps, as a client might send them, and then its silence."""
    rng = random.Random(seed)
    log, known = Log(), []

    def send(body: Body) -> None:
        log.append(encode(body))

    for number in range(8):
        n, length = rng.choice([1, 1, 1, 3]), rng.randint(1, 14)
        added = group(number, [rng.randrange(VOCAB) for _ in range(length)], n, rng.randint(1, 9))
        known += added.sequence_ids
        send(added)
        if rng.random() < 0.4:
            send(Abort(rng.sample(known, min(2, len(known)))))
        log += [None] * rng.randint(0, 3)
    return log + [None] * 150


def replay(log: Log, engine: Engine) -> list[StepOutput]:
    """What the engine answers, read from its bytes."""
    found = []
    for entry in log:
        if entry is not None:
            engine.handle(decode(entry))
            continue
        step = decode(encode(engine.step()))
        assert isinstance(step, StepOutput)
        found.append(step)
    assert not engine.has_work
    engine.scheduler.check_integrity()
    return found


def sequences(steps: list[StepOutput]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for step in steps:
        for sequence_id, token in zip(step.sequence_ids, step.tokens, strict=True):
            tokens.setdefault(sequence_id, []).append(token)
    return tokens


def test_beams_cross_as_plain_data() -> None:
    beams = BeamSearchParams(3, 7, early_stopping="never", length_penalty=0.5)
    added = replace(group(0, [1, 2], 3, 7), beams=beams)
    assert decode(encode(added)) == added
    step = make_engine().step()
    found = [Hypothesis([4, 3], -1.5, End(FinishReason.STOP, None))]
    step = replace(step, beams={"0.0": found})
    assert decode(encode(step)) == step


@pytest.mark.parametrize("seed", range(12))
def test_the_same_messages_give_a_second_engine_the_same_tokens(seed: int) -> None:
    log = random_log(seed)
    first, second = replay(log, make_engine()), replay(log, make_engine())

    def essence(step: StepOutput) -> Any:
        names = sorted(step.first_steps)  # their times are each engine's own
        return step.sequence_ids, step.tokens, step.ends, step.preempted, names

    assert [essence(step) for step in first] == [essence(step) for step in second]
    added = [decode(entry) for entry in log if entry is not None]
    tokens = sequences(first)
    for body in added:
        if isinstance(body, AddGroup):
            for sequence_id in body.sequence_ids:
                context = list(body.prompt_token_ids)
                for token in tokens.get(sequence_id, []):
                    assert token == next_token(context, VOCAB), "another sequence's token"
                    context.append(token)
    scheduled = [name for step in first for name in step.first_steps]
    ahead = {body.sequence_ids[0] for body in added if isinstance(body, AddGroup)}
    assert len(set(scheduled)) == len(scheduled) and set(tokens) & ahead <= set(scheduled) <= ahead


def test_each_sequence_has_the_turn_of_its_group() -> None:
    engine = make_engine(overlap=False)
    added = group(1, [1, 2], 3, 4, eos=frozenset())
    engine.handle(added)
    while len(engine.scheduler.running) < SLOTS:
        engine.step()
    assert {one.queueing.client for one in engine.scheduler.running} == {"client 1"}


def test_who_loses_a_slot_is_told() -> None:
    groups = [group(number, [number] * 8, 1, 15, eos=frozenset()) for number in range(3)]
    log = [encode(body) for body in groups]
    steps = replay([*log, *[None] * 100], make_engine())
    times = {name: count for step in steps for name, count in step.preempted.items()}
    assert "0.0" not in times, "the oldest never does"
    assert sum(times.values()) == steps[-1].stats.num_preemptions > 0


def test_an_engine_tells_of_each_end_once_and_keeps_nothing() -> None:
    engine = make_engine(overlap=False)
    engine.handle(group(0, [1, 2], 2, 4))
    ends: list[str] = []
    while engine.has_work:
        step = engine.step()
        ends += [step.sequence_ids[entry] for entry in step.ends]
        assert step.stats.num_running <= 2
    assert sorted(ends) == ["0.0", "0.1"]
    last = engine.step()
    assert (last.tokens, last.stats.num_running, last.stats.page_usage) == ([], 0, 0.0)


def test_one_sequence_of_a_group_scores_the_prompt_for_all(monkeypatch) -> None:
    added = []
    monkeypatch.setattr(Scheduler, "add", lambda self, request: added.append(request))
    body = group(0, [1, 2, 3], 3, 4)
    params = SamplingParams(prompt_logprobs=2)
    make_engine().handle(replace(body, params=params))
    (first,) = added
    behind = [first.group.next_behind()]
    first.group.take_next()
    behind.append(first.group.next_behind())
    assert [r.params.prompt_logprobs for r in (first, *behind)] == [2, None, None]
    assert params.prompt_logprobs == 2, "the message is as it was"
    assert [r.request_id for r in (first, *behind)] == body.sequence_ids
    assert [r.seed for r in (first, *behind)] == body.seeds


def test_what_is_no_message_for_an_engine_is_refused() -> None:
    with pytest.raises(MessageError, match="output"):
        make_engine().handle(make_engine().step())


def test_embeddings_cross_as_they_are() -> None:
    embeds = np.random.default_rng(0).normal(size=(3, 5)).astype("f")
    message = replace(
        group(0, [7, NO_ID, NO_ID, NO_ID, 8], 1, 1),
        pooling=PoolingParams("mean", False, 2),
        spans=[PromptSpan("prompt_embeds", 1, 3, embeds.shape, embeds.tobytes())],
    )
    frame = wire.encode(message)
    added = wire.decode(frame[4:])
    assert added == message and isinstance(added, AddGroup)
    assert added.spans[0].data == embeds.tobytes()
    plain = wire.encode(replace(message, spans=[]))
    assert len(frame) < len(plain) + embeds.nbytes + 32, "as bytes, not as text"
    told = replace(make_engine().step(), reports={POOLING: {"0.0": embeds[0].tolist()}})
    assert decode(encode(told)) == told


def test_what_is_sent_to_a_closed_engine() -> None:
    engine = make_engine()
    engine.handle(group(0, [1], 1, 4))
    engine.handle(Control(Action.CLOSE))
    assert engine.is_closed
    engine.handle(Abort(["0.0", "7.0"]))  # it was on its way
    with pytest.raises(EngineDeadError, match="closed"):
        engine.handle(group(1, [1], 1, 4))
    with pytest.raises(EngineDeadError, match="closed"):
        engine.step()


def test_who_may_be_in_a_step_for_the_first_time_is_told_before_it() -> None:
    engine, told = make_engine(overlap=False), list[list[str]]()

    def hear(begun: FirstSteps) -> None:
        body = decode(encode(begun))
        assert isinstance(body, FirstSteps)
        told.append(body.sequence_ids)

    engine.announce = hear
    for number, n in ((0, 1), (1, 2)):
        engine.handle(group(number, [1, 2, 3], n, 6, eos=frozenset()))
    seen: set[str] = set()
    while engine.has_work:
        before = len(told)
        step = engine.step()
        begun = {name for ids in told for name in ids}
        assert set(step.sequence_ids) <= begun, "nobody gets a token unannounced"
        seen |= set(step.sequence_ids)
        if len(told) > before:
            assert len(told) == before + 1
    assert seen == {"0.0", "1.0", "1.1"} and len(told) <= 3, "not at every step"


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_sequence_goes_on_from_what_another_engine_had_generated(cut: int) -> None:
    whole = group(0, [1, 2, 3], 1, 9, eos=frozenset())
    expected = sequences(replay([encode(whole), *[None] * 20], make_engine()))
    tokens = expected["0.0"]
    assert len(tokens) == 9
    rest = replace(whole, output_token_ids=tokens[:cut])
    found = replay([encode(rest), *[None] * 20], make_engine())
    assert sequences(found)["0.0"] == tokens[cut:]
    ends = [end for step in found for end in step.ends.values()]
    assert ends == [End(FinishReason.LENGTH, None)], "it ends at max_tokens in all"
    assert rest.output_token_ids == tokens[:cut], "the message is as it was"

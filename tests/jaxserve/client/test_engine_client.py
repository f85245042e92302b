"""Clients: the same outputs whatever lies between caller and engine."""

from __future__ import annotations

import json
import random
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from checkpoints import bundled_model_path
from jaxserve import EngineConfig, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.boundary.image_tiles import Tiling
from jaxserve.boundary.messages import Abort, AddGroup, Body, FirstStep, StepOutput
from jaxserve.boundary.prompt_spans import PromptSpan
from jaxserve.client.engine_client import EngineClient, LocalClient, work_of
from jaxserve.client.output_processor import OutputProcessor
from jaxserve.client.thread_client import ThreadClient
from jaxserve.engine.loop import Engine
from jaxserve.errors import EngineDeadError
from jaxserve.loading.engine_build import LoadedEngine, load_engine
from jaxserve.observability.step_clock import ClientClock
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import End, FinishReason, StopRule
from jaxserve.tokenization.tokenizer import Tokenizer
from tests.jaxserve.client.test_deadlines import make_client, stub_engine
from tests.jaxserve.codec import decode, encode
from tests.waiting import until


@pytest.fixture(scope="module")
def config(model_folder) -> EngineConfig:
    vocab = json.loads((bundled_model_path() / "config.json").read_text())["vocab_size"]
    folder = model_folder("llama_gqa", num_hidden_layers=1, vocab_size=vocab)
    return EngineConfig.from_settings(
        model=str(folder),
        tokenizer=str(bundled_model_path()),
        max_model_len=160,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        num_pages=26,
        block_size=8,
        compile_ahead=2,
        compile_in_background=False,
    )


class CodedClient(LocalClient):
    """All that passes between it and its engine is bytes."""

    def __init__(self, loaded: LoadedEngine):
        super().__init__(loaded)
        self.sent: list[Body] = []

    def outputs(self) -> list[RequestOutput]:
        return self._take(decode(encode(self.engine.step())))

    def _post(self, body: Body) -> None:
        self.sent.append(decode(encode(body)))
        self.engine.handle(self.sent[-1])


def workload() -> list[tuple[Any, SamplingParams]]:
    options: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 3},
        {"n": 3, "temperature": 0.9, "prompt_logprobs": 0, "repetition_penalty": 1.2},
        {"stop": ["e", "7"], "include_stop_str_in_output": True},
        {"logit_bias": {5: 4.0}, "allowed_token_ids": list(range(3, 60)), "min_tokens": 4},
        {"bad_words": ["the", " a"], "stop_token_ids": [9], "top_k": 5},
        {"ignore_eos": True, "output_kind": RequestOutputKind.DELTA},
    ]
    rng = random.Random(0)
    prompts: list[Any] = ["Add 2 and 3.", [5, 6, 7], "x" * 40, "Sort: pear", "hello", [8] * 60]
    params = [
        SamplingParams(seed=rng.randrange(99), max_tokens=40, **(option | {"top_p": 0.9}))
        for option in options
    ]
    return list(zip(prompts, params, strict=True))


def serve(client: EngineClient, wait: Any = lambda: None) -> list[list[RequestOutput]]:
    """The outputs of each request of the workload, those of the engine's own times left out."""
    found: dict[str, list[RequestOutput]] = {}
    for index, (prompt, params) in enumerate(workload()):
        client.add(client.prepare(prompt, params, str(index)))
        found[str(index)] = []
    while client.has_work:
        wait()
        for output in client.outputs():
            assert output.metrics is not None and output.metrics.first_scheduled_time is not None
            output.metrics = None
            found[output.request_id].append(output)
    return list(found.values())


def essence(outputs: list[list[RequestOutput]]) -> list[Any]:
    """What does not depend on who shared a step with whom."""
    return [
        [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in one.outputs]
        for request in outputs
        for one in request
    ]


@pytest.mark.slow
def test_nothing_but_bytes_between_client_and_engine(config) -> None:
    plain, coded = LocalClient(load_engine(config)), CodedClient(load_engine(config))
    expected = serve(plain)
    assert [outputs[-1].finished for outputs in expected] == [True] * 6
    assert serve(coded) == expected
    bodies = coded.sent
    added = [body for body in bodies if isinstance(body, AddGroup)]
    assert not any(body.params.stop for body in added), "stop strings are the client's"
    stopped = expected[2][-1].outputs[0]
    assert stopped.stop_reason in ("e", "7"), "the test means to meet one"
    assert Abort(added[2].sequence_ids) in bodies, "else the engine would go on"
    for client in (plain, coded):
        stats = client.stats()
        assert (stats.num_running, stats.num_waiting, stats.page_usage) == (0, 0, 0.0)
        client.close()


@pytest.mark.slow
def test_the_same_outputs_from_an_engine_in_a_thread_of_its_own(config) -> None:
    local = LocalClient(load_engine(config))
    expected = serve(local)
    local.close()
    news = threading.Event()
    client = ThreadClient(config, ClientClock(), news.set)
    client.start()
    while not client.is_ready:
        assert not client.is_dead, client.error
        threading.Event().wait(0.02)

    def wait() -> None:
        assert news.wait(60)
        news.clear()

    assert essence(serve(client, wait)) == essence(expected)
    assert client.stats().num_steps > 0
    client.add(client.prepare([5], SamplingParams(max_tokens=100, ignore_eos=True), "cut off"))
    late = client.prepare([5], SamplingParams(), "late")
    client.close()
    client.add(late)
    client.join()
    assert client.is_dead and client.error is None
    with pytest.raises(EngineDeadError, match="shut down"):
        while client.has_work:
            client.outputs()


@pytest.mark.slow
def test_an_engine_in_a_thread_that_hangs_is_silent_until_it_goes_on(config, monkeypatch) -> None:
    monkeypatch.setattr("jaxserve.liveness.silence.SILENT_S", 0.3)
    may_step, step = threading.Event(), Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: may_step.wait(60) and step(engine))
    news = threading.Event()
    client = ThreadClient(config, ClientClock(), news.set)
    client.start()
    while not client.is_ready:
        assert not client.is_dead, client.error
        threading.Event().wait(0.02)
    client.add(client.prepare([5], SamplingParams(max_tokens=3, ignore_eos=True), "a"))
    until(lambda: client.silence)
    may_step.set()
    while client.has_work:
        assert news.wait(60)
        news.clear()
        client.outputs()
    assert client.silence is None
    client.close()
    client.join()


@pytest.mark.slow
def test_a_caller_may_change_the_prompt_that_it_is_shown(config) -> None:
    client = LocalClient(load_engine(config))
    prepared = client.prepare([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True), "a")
    client.add(prepared)
    while client.has_work:
        for output in client.outputs():
            output.prompt_token_ids += output.outputs[0].token_ids
    assert prepared.group.prompt_token_ids == [5, 6, 7], "the engine may have to compute it again"
    client.close()


@pytest.mark.slow
def test_an_interrupt_anywhere_costs_only_its_call(config, monkeypatch) -> None:
    client = LocalClient(load_engine(config))
    prepared = [client.prepare([5, 6], SamplingParams(max_tokens=2), name) for name in "abc"]

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client.engine, "handle", interrupted)  # it never learns of the message
        with pytest.raises(KeyboardInterrupt):
            client.add(prepared[0])
    with monkeypatch.context() as patch:
        patch.setattr(OutputProcessor, "add", interrupted)  # the engine has the request
        with pytest.raises(KeyboardInterrupt):
            client.add(prepared[0])
    assert not client.engine.scheduler.has_unfinished
    client.add(prepared[1])
    with monkeypatch.context() as patch:
        patch.setattr(client, "_take", interrupted)  # the step's output is lost
        with pytest.raises(KeyboardInterrupt):
            client.outputs()
    client.abort("b")
    client.add(prepared[2])
    done: list[str] = []
    while client.has_work:
        done += [output.request_id for output in client.outputs() if output.finished]
    assert done == ["c"]
    client.close()


def test_metrics_name_a_model_and_no_path(tmp_path) -> None:
    def label(**settings: Any) -> str:
        client = ThreadClient(EngineConfig(**settings), ClientClock(), lambda: None)
        text = generate_latest(client.metrics.registry).decode()
        (found,) = set(re.findall(r'model_name="([^"]*)"', text))
        return found

    (tmp_path / "my-model").mkdir()
    assert label(model=str(tmp_path / "my-model")) == "my-model"
    assert label(model="owner/name") == "owner/name"
    assert label(model=str(tmp_path / "my-model"), served_model_name=("a", "b")) == "a"


def test_a_sequence_that_meets_a_stop_string_leaves_the_ledger() -> None:
    """Before the others of its request have ended: its slot is free."""
    told: list[StepOutput] = []
    client = make_client(tokenizer=Tokenizer(bundled_model_path()))
    client.engine = stub_engine(told)
    text, stop = (client.tokenizer.encode(one)[-1] for one in "ae")
    params = SamplingParams(n=3, max_tokens=15, stop=["e"])
    prepared = client.prepare([1, 2, 3], params, "r")
    client.add(prepared)
    ids, stats = prepared.group.sequence_ids, client.stats()
    first = {ids[0]: FirstStep(0.0, None, 0)}
    told.append(StepOutput(ids, [text, text, text], {}, {}, first, {}, stats))
    told.append(StepOutput(ids, [text, stop, text], {}, {}, {}, {}, stats))
    # one by a stop string, one by its length, and one by both
    end = End(FinishReason.LENGTH, None)
    told.append(StepOutput(ids[::2], [text, stop], {0: end, 1: end}, {}, {}, {}, stats))
    counts = []
    while told:
        client.outputs()
        counts.append(client.ledger._sequences)
    assert counts == [3, 2, 0] and not client.ledger.is_admitted("r")


@pytest.mark.parametrize(
    ("part", "tiling", "waits", "held"),
    [
        ("images", None, True, 20),
        ("images", Tiling(((9, 9),), 9, 2), True, 12 + 3 * 5 * 4),  # three tiles of five rows
        ("prompt_embeds", None, False, 12),
    ],
)
def test_a_request_waits_for_its_images_and_holds_what_they_become(
    part, tiling, waits, held
) -> None:
    rule, spans = (
        StopRule(frozenset(), frozenset(), 0, 4),
        [PromptSpan(part, 0, 2, (3,), bytes(12))],
    )
    facts: Any = SimpleNamespace(hidden_size=1, images=ImageFacts(9, (3,), 2, tiling=tiling))
    params, turn = SamplingParams(max_tokens=4), Queueing(0.0, 0, None, "")
    work = work_of(AddGroup(["0"], [0], [5, 5], params, rule, [], turn, spans=spans), 0, facts)
    assert (work.compiles, work.media_bytes) == (waits, held)

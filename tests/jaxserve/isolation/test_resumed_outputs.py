"""An engine's process that is killed in the middle: its requests end as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import (
    BeamSearchParams,
    EngineConfig,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from jaxserve.client.engine_client import EngineClient, LocalClient
from jaxserve.config.engine_config import Isolation
from jaxserve.isolation.process_client import ProcessClient
from jaxserve.loading.engine_build import load_engine
from jaxserve.observability.step_clock import ClientClock
from tests.waiting import until

CONFIG = EngineConfig.from_settings(
    model=str(bundled_model_path()),
    max_model_len=192,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_pages=40,
    block_size=8,
    enable_embeddings=True,
    compile_ahead=2,
    compile_in_background=False,
)
LONG: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "temperature": 0.9}
DELTA = RequestOutputKind.DELTA
WORKLOAD: list[tuple[Any, Any]] = [
    ("Once upon a time", SamplingParams(**LONG, seed=1, output_kind=DELTA)),
    ("Add 2 and 3.", SamplingParams(**LONG, seed=2, logprobs=2, prompt_logprobs=1)),
    ("x" * 70, SamplingParams(**LONG, seed=3, presence_penalty=1.5, repetition_penalty=1.3)),
    ("hello", SamplingParams(**LONG, seed=4, frequency_penalty=0.7, output_kind=DELTA)),
    ([5, 6, 7], SamplingParams(**LONG, seed=5, n=3, top_p=0.9, output_kind=DELTA)),
    ("Sort: pear", SamplingParams(max_tokens=90, seed=6, min_tokens=60, output_kind=DELTA)),
    ("One two", SamplingParams(**LONG, seed=7, stop=["zzzz", "ab"], logit_bias={9: 2.0})),
    ("The the the", SamplingParams(**LONG, seed=8, bad_words=["the", " a cat"])),
    ("Greedy", SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)),
    ("Beams", BeamSearchParams(3, 40, ignore_eos=True)),
    ("Embed me", PoolingParams()),
]


def collected(client: EngineClient, turn: Any) -> list[list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    for index, (prompt, params) in enumerate(WORKLOAD):
        client.add(client.prepare(prompt, params, str(index)))
        found[str(index)] = []
    while client.has_work:
        turn(found)
        for output in client.outputs():
            found[output.request_id].append(output)
    assert not client.take_failures()
    return list(found.values())


def whole(outputs: list[RequestOutput], delta: bool) -> list[Any]:
    """Text, tokens, ends and log-probabilities of each completion, put together."""
    last = outputs[-1]
    told: dict[int, list[Any]] = {}
    for output in outputs if delta else [last]:
        for one in output.outputs:
            kept = told.setdefault(one.index, ["", [], None, None, []])
            kept[0] += one.text
            kept[1] += one.token_ids
            kept[2], kept[3] = one.finish_reason, one.stop_reason
            kept[4] += one.logprobs or []
    return [*sorted(told.items()), last.finished]


def without_numbers(found: list[Any]) -> list[Any]:
    return [(index, one[:4], [[*p] for p in one[4]]) for index, one in found[:-1]] + found[-1:]


@pytest.fixture(scope="module")
def expected() -> list[list[RequestOutput]]:
    client = LocalClient(load_engine(CONFIG))
    found = collected(client, lambda found: None)
    client.close()
    return found


@pytest.fixture(scope="module")
def client() -> Iterator[tuple[ProcessClient, threading.Event]]:
    news = threading.Event()
    client = ProcessClient(CONFIG, ClientClock(), news.set, Isolation())
    client.start()
    until(lambda: client.is_ready or client.is_dead)
    assert not client.is_dead, client.error
    yield client, news
    client.close()
    client.join()


def same(found: list[list[RequestOutput]], expected: list[list[RequestOutput]]) -> None:
    for (_, params), ours, theirs in zip(WORKLOAD, found, expected, strict=True):
        delta = getattr(params, "output_kind", None) is DELTA
        a, b = whole(ours, delta), whole(theirs, delta)
        assert without_numbers(a) == without_numbers(b), params
        for (_, one), (_, other) in zip(a[:-1], b[:-1]):
            for mine, their in zip(one[4], other[4], strict=True):
                for token, value in mine.items():
                    assert value.logprob == pytest.approx(their[token].logprob, abs=1e-4)
        assert (ours[-1].prompt_logprobs is None) == (theirs[-1].prompt_logprobs is None)
        if theirs[-1].embedding is not None:
            assert ours[-1].embedding == pytest.approx(theirs[-1].embedding, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 30])
def test_nothing_is_lost_and_nothing_comes_twice(client, expected, after: int) -> None:
    serving, news = client
    killed = False

    def turn(found: dict[str, list[RequestOutput]]) -> None:
        nonlocal killed
        assert news.wait(60), "nothing came"
        news.clear()
        if not killed and len(found["0"]) > after:
            killed = True
            os.kill(serving.pid, signal.SIGKILL)

    before = serving.stats().num_steps
    same(collected(serving, turn), expected)
    assert killed and serving.is_ready
    assert serving.stats().num_steps > before

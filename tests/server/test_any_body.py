"""Any body at all: an answer or an error that is the client's, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from checkpoints import bundled_model_path
from jaxserve.async_engine import AsyncEngine
from jaxserve.config.engine_config import EngineConfig
from server.app import create_app
from server.protocol.anthropic_errors import is_anthropic
from server.protocol.anthropic_request import CountTokensRequest, MessagesRequest
from server.protocol.chat import ChatCompletionRequest, ChatTokenizeRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embed_v2 import EmbedV2Request
from server.protocol.pooling import ClassifyRequest, EmbeddingRequest, PoolingRequest
from server.protocol.responses_request import ResponsesRequest
from server.protocol.scoring import RerankRequest, ScoreRequest
from server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from server.protocol.unsupported import NEUTRAL, REFUSED
from tests.server.fake_engine import FakeEngine

MODELS: list[tuple[str, Any]] = [
    ("/v1/completions", CompletionRequest),
    ("/v1/chat/completions", ChatCompletionRequest),
    ("/v1/responses", ResponsesRequest),
    ("/v1/messages", MessagesRequest),
    ("/v1/messages/count_tokens", CountTokensRequest),
    ("/v1/embeddings", EmbeddingRequest),
    ("/pooling", PoolingRequest),
    ("/classify", ClassifyRequest),
    ("/v2/embed", EmbedV2Request),
    ("/score", ScoreRequest),
    ("/rerank", RerankRequest),
    ("/tokenize", TokenizeRequest),
    ("/tokenize", ChatTokenizeRequest),
    ("/detokenize", DetokenizeRequest),
]
TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "<|end|><|system|>", "\ud800", "\x00", "a" * 3000, "1" * 3000, "never"]),
)
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, -1, 0.0, 1.0, 0.5, -0.0, 1e308, 1e-9]),
    st.floats(allow_nan=True, allow_infinity=True),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
TOKENS = st.lists(st.integers(-1, 400), max_size=6)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "", "end"])},
    optional={
        "content": st.one_of(TEXT, SCALARS, st.just([{"type": "text", "text": "x"}])),
        "name": SCALARS,
    },
)
VALUES = st.one_of(
    SCALARS,
    TOKENS,
    st.lists(TEXT, max_size=4),
    st.lists(TURN, max_size=3),
    st.lists(TOKENS, max_size=3),
    st.dictionaries(st.one_of(TEXT, st.sampled_from(["5", "-1", "self"])), SCALARS, max_size=3),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=8),
)
LIKELY = {
    "prompt": st.one_of(TOKENS, TEXT, st.lists(TEXT, max_size=3)),
    "input": st.one_of(TOKENS, TEXT),
    **dict.fromkeys(("query", "queries", "documents"), st.one_of(TEXT, st.lists(TEXT, max_size=3))),
    "messages": st.lists(TURN, min_size=1, max_size=3),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.integers(0, 6),
    "max_output_tokens": st.integers(0, 6),
    "background": st.none(),  # what it leaves is made when nobody waits
    "n": st.integers(0, 4),
    "model": st.none(),
    "timeout": st.sampled_from([None, 30.0, 0, -1, 1e-9]),
    "stream": st.booleans(),
}


@st.composite
def requests(draw: Any) -> tuple[str, dict[str, Any]]:
    """A path, and a body of the fields that it knows."""
    path, model = draw(st.sampled_from(MODELS))
    needed = [name for name, field in model.model_fields.items() if field.is_required()]
    names = draw(
        st.lists(
            st.sampled_from([*model.model_fields, *NEUTRAL, *REFUSED]), max_size=5, unique=True
        )
    )
    body = {}
    for name in dict.fromkeys([*needed, *names]):
        likely = LIKELY.get(name, VALUES)
        # mostly what gets past the first check
        body[name] = draw(likely if draw(st.integers(0, 9)) < 8 else VALUES)
    if "max_tokens" not in body and draw(st.booleans()):
        body["max_tokens"] = 3
    return path, body


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_answer(client: TestClient, path: str, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    try:
        content = json.dumps(body).encode()
    except UnicodeEncodeError:
        return
    response = client.post(path, content=content, headers=headers)
    assert response.status_code in (200, 400, 404, 413, 504), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert is_anthropic(path) or error["code"] == response.status_code
        assert len(response.content) < 8192
        assert "Traceback" not in error["message"] and "0x7f" not in error["message"]
    elif body.get("stream") is True:
        assert b'"code": 500' not in response.content and b'"code":500' not in response.content
        if path in ("/v1/responses", "/v1/messages"):
            ends = (b"event: response.", b"event: message_stop", b"event: error")
            assert response.content.split(b"\n\n")[-2].startswith(ends)
        else:
            assert response.content.endswith(b"data: [DONE]\n\n")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_no_body_is_our_error(given: tuple[str, dict[str, Any]]) -> None:
    client, engine = fake_client()
    check_answer(client, *given)
    assert sorted(engine.started) == sorted(engine.aborted + engine.finished)


_FAKE: list[tuple[TestClient, FakeEngine]] = []


def fake_client() -> tuple[TestClient, FakeEngine]:
    """One for all examples: making one costs more than an example."""
    if not _FAKE:
        engine = FakeEngine("ok", enable_embeddings=True)
        _FAKE.append((TestClient(create_app(engine), raise_server_exceptions=False), engine))
    return _FAKE[0]


class Loop:
    """A client of a real engine, in one event loop, whose tasks can be counted."""

    def __init__(self, client: TestClient, engine: AsyncEngine):
        self.client, self.engine = client, engine
        self.descriptors: int | None = None

    def tasks(self) -> int:
        async def count() -> int:
            await asyncio.sleep(0)
            return len(asyncio.all_tasks())

        portal = self.client.portal
        assert portal is not None
        return int(portal.call(count))

    def check_nothing_is_left(self, tasks: int) -> None:
        for _ in range(500):
            stats = self.engine.client.stats()
            counts = (stats.num_running, stats.num_waiting, stats.pages.num_active, self.tasks())
            if counts == (0, 0, 0, tasks):
                break
            # a step has to say that the aborted ones are gone
            self.client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
        assert counts == (0, 0, 0, tasks)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    config = EngineConfig(
        model=str(bundled_model_path()),
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_pages=40,
        compile_ahead=2,
        compile_in_background=False,
        enable_embeddings=True,
        served_model_name=("tiny",),
    )
    engine = AsyncEngine(config)
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        assert client.portal is not None
        client.portal.call(engine.wait_ready)
        client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
        yield Loop(client, engine)


@pytest.mark.slow
def test_no_body_leaves_anything_behind(loop: Loop) -> None:
    tasks = loop.tasks()
    descriptors: list[int] = []

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(requests())
    def check(given: tuple[str, dict[str, Any]]) -> None:
        check_answer(loop.client, *given)
        loop.check_nothing_is_left(tasks)
        descriptors.append(num_descriptors())

    check()
    assert max(descriptors) <= descriptors[0] + 3, "threads of the pool open a few"
    assert loop.engine.client.stats().num_integrity_failures == 0

"""`POST /score` and `/rerank`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.client.similarity import cosine
from server.app import create_app
from server.client_limits import Limits
from server.options import Options
from tests.server.fake_engine import FakeEngine

PAIR, RANK = {"queries": "a", "documents": "b"}, {"query": "a", "documents": "b"}
SCORES, RANKS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")


def served(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    """Its vectors are of a text's first token and 0.1."""
    return FakeEngine(enable_embeddings=True)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    yield from served(engine)


@pytest.fixture
def judge() -> FakeEngine:
    """A score is a pair's first token."""
    return FakeEngine(labels=("good",), enable_embeddings=True)


@pytest.fixture
def judged(judge: FakeEngine) -> Iterator[TestClient]:
    yield from served(judge)


@pytest.mark.parametrize(
    ("first", "second"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
@pytest.mark.parametrize("path", SCORES)
def test_a_pair_is_one_prompt(
    judged: TestClient, judge: FakeEngine, path: str, first: str, second: str
) -> None:
    body = {first: "a", second: ["b", "cd"], "add_special_tokens": False}
    answer = judged.post(path, json=body).json()
    assert answer.pop("id").startswith("score-") and answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": "/models/fake",
        "data": [{"index": i, "object": "score", "score": 97.0} for i in range(2)],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert sorted(judge.prompts) == [[*b"ab"], [*b"acd"]]
    body = {first: ["x", "y"], second: ["b", "c"], "add_special_tokens": False}
    found = judged.post(path, json=body).json()["data"]
    assert [one["score"] for one in found] == [120.0, 121.0]


def test_texts_with_vectors_are_compared(client: TestClient, engine: FakeEngine) -> None:
    body = {"queries": "a", "documents": ["a", "b"], "add_special_tokens": False}
    answer = client.post("/score", json=body).json()
    same, near = (one["score"] for one in answer["data"])
    assert same == pytest.approx(1.0) and 0.99 < near < 1.0
    assert sorted(engine.prompts) == [[97], [97], [98]]
    assert answer["usage"]["prompt_tokens"] == 3


def test_texts_may_be_wrapped(judged: TestClient) -> None:
    """As clients of Jina and Cohere, and of vLLM's parts, do it."""
    body = {"query": "", "documents": ["b", "d"], "add_special_tokens": False}
    parts = {"content": [{"type": "text", "text": "d"}]}
    wrapped = body | {"documents": [{"text": "b"}, parts], "return_documents": False}
    plain = judged.post("/rerank", json=body).json()["results"]
    found = judged.post("/rerank", json=wrapped).json()["results"]
    assert all(one.pop("document") for one in plain) and found == plain
    for other in ({"text": "b", "title": "c"}, {"text": 3}, {"content": []}, 3):
        refused = judged.post("/rerank", json=body | {"documents": [other]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"


@pytest.mark.parametrize("path", RANKS)
def test_documents_come_the_best_first(judged: TestClient, path: str) -> None:
    body = {"query": "", "documents": ["b", "d", "c"], "add_special_tokens": False}
    answer = judged.post(path, json=body).json()
    assert answer["results"] == [
        {
            "index": index,
            "document": {"text": text, "multi_modal": None},
            "relevance_score": float(ord(text)),
        }
        for index, text in ((1, "d"), (2, "c"), (0, "b"))
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    best = judged.post(path, json=body | {"top_n": 1, "request_id": "mine"}).json()
    assert best["results"] == answer["results"][:1] and best["id"] == "rerank-mine"


def test_texts_are_cut_before_and_behind(judged: TestClient, judge: FakeEngine) -> None:
    body = {"query": "abc", "documents": "xyz", "add_special_tokens": False}
    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 1}
    assert judged.post("/rerank", json=body | limits).status_code == 200
    cut = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert judged.post("/rerank", json=body | cut).status_code == 200
    assert judge.prompts == [[*b"abx"], [*b"abc"]]


def test_a_text_is_cut_once_however_many_it_is_paired_with(
    judged: TestClient, judge: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[str] = []
    monkeypatch.setattr(judge.tokenizer, "beginning", lambda text, most: cut.append(text) or text)
    body = {"query": "q", "documents": ["a", "b", "c"], "max_tokens_per_query": 2}
    assert judged.post("/rerank", json=body | {"max_tokens_per_doc": 2}).status_code == 200
    assert cut == ["q", "a", "b", "c"]


def test_a_query_of_many_documents_is_no_longer_than_the_context() -> None:
    """It is tokenised with each of them, also where what is behind the context is cut off."""
    engine = FakeEngine(max_model_len=4096, labels=("good",), enable_embeddings=True)
    body = {"query": "q" * 40_000, "truncate_prompt_tokens": 5}
    for client in served(engine):
        assert client.post("/rerank", json=body | {"documents": ["a"]}).status_code == 200
        refused = client.post("/rerank", json=body | {"documents": ["a", "b"]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "query"


def test_a_template_puts_pairs_together(tmp_path: Any) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    engine = FakeEngine(labels=("good",), enable_embeddings=True, chat_template=str(template))
    options = Options(template_variables={"y": "s", "x": "t"})
    limits = Limits(allow_control_tokens=True)
    with TestClient(create_app(engine, options=options, limits=limits)) as client:
        body = {"queries": "q", "documents": "d", "add_special_tokens": False}
        more = {"instruction": "i", "chat_template_kwargs": {"x": "k"}}
        marks: list[bool] = []
        render = engine.tokenizer.render_chat
        engine.tokenizer.render_chat = lambda *a, mark, **b: (
            marks.append(mark) or render(*a, mark=mark, **b)
        )
        assert client.post("/score", json=body | more).status_code == 200
    assert engine.prompts == [[*b"[query]q[document]dski"]] and marks == [False]


@pytest.mark.parametrize(
    "variables", [{"tools": []}, {"mark": 1}, {"messages": []}, dict.fromkeys(map(str, range(65)))]
)
def test_variables_are_those_of_chats(judged: TestClient, variables: dict[str, Any]) -> None:
    refused = judged.post("/score", json=PAIR | {"chat_template_kwargs": variables})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"


def test_many_numbers_are_compared_beside_the_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    monkeypatch.setattr("server.routes.pooled.QUICK_ENTRIES", 3)
    monkeypatch.setattr(
        "server.routes.scoring.cosine",
        lambda *vectors: threads.append(threading.current_thread().name) or cosine(*vectors),
    )
    assert client.post("/score", json=PAIR).json()["data"][0]["score"] == pytest.approx(1.0)
    assert threads and threads[0].startswith("asyncio_")


def test_a_request_whose_time_is_over_is_told_so(judged: TestClient, judge: FakeEngine) -> None:
    judge.abort_after, judge.abort_reason = 0, "timeout"
    response = judged.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert response.status_code == 504 and response.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "queries"),
        ("/score", {"queries": "a"}, "queries"),
        ("/score", PAIR | {"text_2": "c"}, "queries"),
        ("/score", {"queries": [], "documents": "b"}, "queries"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "documents"),
        ("/score", {"queries": "a", "documents": {"content": []}}, "documents"),
        ("/score", {"queries": "a", "documents": ["b"] * 2000}, "documents"),
        ("/score", {"queries": "a", "documents": "b" * 70}, "documents"),
        ("/score", {"queries": "a", "documents": "b" * 10**6}, "documents"),
        ("/score", PAIR | {"max_tokens_per_doc": -5}, "max_tokens_per_doc"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", RANK | {"top_n": -1}, "top_n"),
        ("/rerank", RANK | {"max_tokens_per_query": 64}, "max_tokens_per_query"),
        ("/rerank", RANK | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/rerank", RANK | {"priority": 3}, "priority"),
    ],
)
def test_bad_input(judged: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    response = judged.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_model_with_vectors_has_no_template(client: TestClient) -> None:
    body = {"queries": "a", "documents": "b", "instruction": "x"}
    error = client.post("/score", json=body).json()["error"]
    assert error["code"] == 400 and error["param"] == "instruction"

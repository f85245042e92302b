"""Routes beside completions on real servers: what vLLM, Jina and Cohere publish of them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.server_process import Server, running_server

pytestmark = pytest.mark.slow

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")

FLAGS = ("--enable-control-routes", "--trust-request-chat-template", "--enable-auto-tool-choice")
FLAGS += ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
# one label: whether the model would go on with the one token rather than with the other
LABELS = {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["a", "b"]}
LABELS |= {"method": "from_2_way_softmax"}
TEXTS = ["Paris is in France.", "2 + 3 = 5", "The letters a b c"]
QUESTION = [{"role": "user", "content": "What is the sum of two and three?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("none", *FLAGS) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def judge() -> Iterator[Server]:
    with running_server("none", "--hf-overrides", json.dumps(LABELS)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def post(server: Server, path: str, body: dict[str, Any] | None = None, **query: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, params=query, timeout=60)


def told(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("name", ["server", "judge"])
def test_documents_are_ranked(request: pytest.FixtureRequest, name: str, path: str) -> None:
    """Bodies as Jina (`return_documents`, objects with a text) and Cohere publish them."""
    server = request.getfixturevalue(name)
    body = {"model": "tiny", "query": "What is 2 + 3?", "documents": TEXTS, "top_n": 2}
    found = told(server, path, body)
    scores = [one["relevance_score"] for one in found["results"]]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)
    assert all(TEXTS[one["index"]] == one["document"]["text"] for one in found["results"])
    assert found["usage"]["total_tokens"] > 0 and found["model"] == "tiny"
    objects = [{"text": text} for text in TEXTS]
    same = told(server, path, body | {"documents": objects, "return_documents": False})
    expected = [(one["index"], one["relevance_score"]) for one in found["results"]]
    assert [tuple(one.values()) for one in same["results"]] == expected


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("name", ["server", "judge"])
def test_pairs_are_scored(request: pytest.FixtureRequest, name: str, path: str) -> None:
    server = request.getfixturevalue(name)
    one = told(server, path, {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS})["data"]
    assert [item["index"] for item in one] == [0, 1, 2]
    each = {"queries": [TEXTS[0]] * 3, "documents": TEXTS, "encoding_format": "float"}
    other = told(server, path, each)["data"]
    scores = [[item["score"] for item in found] for found in (one, other)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    if name == "server":
        assert scores[0][0] == pytest.approx(1.0, abs=1e-5)


def test_texts_are_classified(judge: Server) -> None:
    found = told(judge, "/classify", {"model": "tiny", "input": TEXTS[:2]})["data"]
    assert [one["num_classes"] for one in found] == [1, 1]
    assert all(0 <= one["probs"][0] <= 1 for one in found)
    pooled = told(judge, "/pooling", {"model": "tiny", "input": TEXTS[:2]})["data"]
    assert [one["data"] for one in pooled] == [one["probs"] for one in found]


def test_texts_are_pooled(server: Server) -> None:
    body = {"model": "tiny", "input": TEXTS, "encoding_format": "base64"}
    pooled = told(server, "/pooling", body)["data"]
    vectors = [np.frombuffer(base64.b64decode(one["data"]), np.float32) for one in pooled]
    plain = told(server, "/v1/embeddings", body | {"encoding_format": "float"})["data"]
    for one, other in zip(vectors, plain, strict=True):
        assert np.linalg.norm(one) == pytest.approx(1, abs=1e-4)
        np.testing.assert_allclose(one, other["embedding"], atol=1e-5)
    chat = told(server, "/pooling", {"messages": QUESTION, "task": "embed"})
    assert len(chat["data"][0]["data"]) == len(vectors[0])


def test_several_conversations(server: Server) -> None:
    body = {"messages": [QUESTION, [{"role": "user", "content": "4+5"}]], "temperature": 0}
    found = told(server, "/v1/chat/completions/batch", body | {"max_tokens": 12, "model": "tiny"})
    for place, choice in enumerate(found["choices"]):
        alone = {"messages": body["messages"][place], "temperature": 0, "max_tokens": 12}
        answer = told(server, "/v1/chat/completions", alone)["choices"][0]
        assert choice["index"] == place and choice["message"] == answer["message"]
    assert found["choices"][1]["message"]["content"] == "4 + 5 = 9"


def test_a_server_sleeps_and_serves_again(server: Server) -> None:
    ask = {"model": "tiny", "prompt": "1+1", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = told(server, "/v1/completions", ask)["choices"][0]["text"]
    endless: dict[str, Any] = {}

    def wait() -> None:
        body = ask | {"max_tokens": 200, "n": 4, "temperature": 1}
        endless["answer"] = post(server, "/v1/completions", body)

    for level in (1, 2):
        running = threading.Thread(target=wait)
        running.start()
        while not server.running():
            pass
        assert post(server, "/sleep", level=level).status_code == 200
        running.join()
        ended = {one["finish_reason"] for one in endless["answer"].json()["choices"]}
        assert ended == {"abort"}, "what ran has ended with what it had"
        assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
        assert httpx.get(f"{server.url}/health").json() == {"status": "paused"}
        assert post(server, "/v1/completions", ask).status_code == 503
        assert post(server, "/wake_up", tags="weights").status_code == 200
        assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
        assert post(server, "/wake_up").status_code == 200
        assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": False}
        assert told(server, "/v1/completions", ask)["choices"][0]["text"] == before


def test_a_template_of_a_request_is_sandboxed(server: Server) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "return_prompt_text": True}
    template = "<|user|>{{ messages[0].content | upper }}<|assistant|>"
    found = told(server, "/v1/chat/completions", body | {"chat_template": template})
    assert found["prompt_text"] == "<|user|>WHAT IS THE SUM OF TWO AND THREE?<|assistant|>"
    for hostile in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 12) %}x{% endfor %}",
    ):
        answer = post(server, "/v1/chat/completions", body | {"chat_template": hostile})
        assert answer.status_code == 400, (hostile, answer.text)
        assert answer.json()["error"]["param"] == "chat_template"


@pytest.mark.parametrize("given", [{"a": 1, "b": [2]}, 3])
def test_what_is_said_to_no_feature_is_refused(server: Server, given: Any) -> None:
    body = {"model": "tiny", "prompt": "1+1", "max_tokens": 2}
    assert told(server, "/v1/completions", body | {"vllm_xargs": {}})["choices"]
    answer = post(server, "/v1/completions", body | {"vllm_xargs": given})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "vllm_xargs"


TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_responses_tell_logprobs_and_messages(client: Any) -> None:
    found = client.responses.create(
        model="tiny",
        input="2+3",
        max_output_tokens=20,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        extra_body={"enable_response_messages": True},
    )
    (part,) = found.output[-1].content
    assert part.text == "2 + 3 = 5" and len(part.logprobs[0].top_logprobs) == 2
    assert all(one.logprob <= 0 for one in part.logprobs)
    assert "".join(one.token for one in part.logprobs).startswith(part.text)
    said = found.model_dump()
    assert "2+3" in json.dumps(said["input_messages"])
    assert part.text in json.dumps(said["output_messages"])
    counted = client.responses.input_tokens.count(model="tiny", input="2+3")
    assert counted.input_tokens == found.usage.input_tokens


def test_a_demanded_call_goes_before_the_format_of_texts(client: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema["additionalProperties"] = False
    found = client.responses.create(
        model="tiny",
        input="What is the weather in Rome?",
        max_output_tokens=64,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "f", "schema": schema, "strict": True}},
    )
    (call,) = found.output
    assert call.type == "function_call" and list(json.loads(call.arguments)) == ["city"]
    # earlier items, as the client has them, go on
    more = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": "What is the weather in Rome?"},
            *(item.model_dump() for item in found.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
        tools=[TOOL],
        max_output_tokens=20,
    )
    assert more.output and more.usage.input_tokens > found.usage.input_tokens
    kept = client.responses.create(
        model="tiny",
        input="And now?",
        tools=[TOOL],
        previous_response_id=more.id,
        max_output_tokens=4,
    )
    assert kept.usage.input_tokens > more.usage.input_tokens

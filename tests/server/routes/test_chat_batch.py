"""`/v1/chat/completions/batch` with a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from server.app import create_app
from server.client_limits import Limits
from server.protocol.chat import BatchChatRequest
from server.tools.choice import Parsers
from tests.server.fake_engine import FakeEngine
from tests.server.test_errors import assert_error

ROUTE = "/v1/chat/completions/batch"
CONVERSATIONS = [
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
]


def test_each_conversation_has_a_choice() -> None:
    engine = FakeEngine("<think>Hm</think>hello", max_model_len=512)
    app = create_app(engine, parsers=Parsers("hermes", True, "qwen3"))
    fields = {"logprobs": True, "temperature": 0.5, "return_token_ids": True}
    with TestClient(app) as client:
        told = client.post(ROUTE, json={"messages": CONVERSATIONS, **fields}).json()
        messages = [one["message"] for one in told["choices"]]
        assert [one["index"] for one in told["choices"]] == [0, 1]
        assert [one["content"] for one in messages] == ["hello"] * 2
        assert [one["reasoning"] for one in messages] == ["Hm"] * 2
        assert len(told["choices"][1]["token_ids"]) == len(engine.reply)
        prompts = ["".join(map(chr, one)) for one in engine.prompts]
        assert prompts == ["[user]a[assistant]", "[user]b[assistant]c[assistant]"]
        assert told["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
        assert all(one.temperature == 0.5 for one in engine.params)
        goes_on = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
        other = [{"role": "assistant", "content": "d"}]
        body = {"messages": [CONVERSATIONS[1], other], **goes_on}
        told = client.post(ROUTE, json=body).json()["choices"]
        assert [one["message"]["content"] for one in told] == ["chello", "dhello"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [CONVERSATIONS[0], []]}, "messages[1]"),
        ({"messages": CONVERSATIONS[0]}, "messages"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": 1}]]}, "messages[1][0]"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "x" * 99}]]}, "messages[1]"),
        ({"stream": True}, "stream"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_refusals(fields: dict[str, Any], field: str) -> None:
    engine = FakeEngine()
    with TestClient(create_app(engine, limits=Limits(max_choices=2))) as client:
        response = client.post(ROUTE, json={"messages": CONVERSATIONS} | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(field), response.text
        assert_error(response, 400, response.json()["error"]["param"])
        assert not engine.started


def test_a_conversation_is_made_ready_once_all_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one body would keep the event loop for seconds."""
    body = {"messages": CONVERSATIONS[:1] * 3}
    made: list[object] = []
    copy = BatchChatRequest.model_copy
    monkeypatch.setattr(
        BatchChatRequest, "model_copy", lambda *a, **b: made.append(copy(*a, **b)) or made[-1]
    )
    few, more = FakeEngine(), FakeEngine(max_num_queued_reqs=2)
    for engine, limits in ((few, Limits(max_choices=2)), (more, Limits())):
        with TestClient(create_app(engine, limits=limits)) as client:
            assert_error(client.post(ROUTE, json=body), 400, "messages")
    with pytest.raises(ValidationError, match="at most 1024 items"):
        BatchChatRequest.model_validate({"messages": CONVERSATIONS[:1] * 1025})
    assert not made

"""Real clients read what a scripted engine says, over HTTP; `test_clients.py` has a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server.app import create_app
from server.tools.choice import Parsers
from tests.server.test_connection import serving
from tests.server.unconstrained import UnconstrainedEngine

openai = pytest.importorskip("openai", reason="needs the extra `test`")

ENGINE = UnconstrainedEngine(max_model_len=512)
ANSWER = '<think>Hm</think>Yes <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER: Any = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ENGINE, parsers=Parsers("hermes", True, "qwen3"))) as port:
        yield f"http://127.0.0.1:{port}"


def test_openai(url: str) -> None:
    ENGINE.reply = ANSWER
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}
    whole = client.responses.create(model="/models/fake", input="hi", tools=[tool])
    with client.responses.stream(model="/models/fake", input="hi", tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    for told in (client.responses.retrieve(whole.id), streamed):
        thought, message, call = told.output
        assert thought.content[0].text == "Hm" and told.output_text.strip() == "Yes"
        assert message.content[0].annotations == [] and call.arguments == '{"a":1}'
        assert told.usage.output_tokens_details.reasoning_tokens == 2
    assert "response.reasoning_text.delta" in kinds and "response.completed" in kinds
    assert streamed.output[2].parsed_arguments == {"a": 1}
    ENGINE.fail_after = 2
    events = list(client.responses.create(model="/models/fake", input="hi", stream=True))
    ENGINE.fail_after = None
    assert events[-1].type == "response.failed" and events[-1].response.error.code


@pytest.mark.slow
def test_anthropic(url: str) -> None:
    # here, for all others would wait for it: it takes seconds
    anthropic = pytest.importorskip("anthropic", reason="needs the extra `test`")
    ENGINE.reply = ANSWER
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    given: Any = {
        "model": "/models/fake",
        "messages": [USER],
        "max_tokens": 200,
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
    }
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        streamed = stream.get_final_message()
    for told in (whole, streamed):
        thought, text, call = told.content
        assert thought.thinking == "Hm" and text.text.strip() == "Yes" and call.input == {"a": 1}
        assert told.stop_reason == "tool_use"
        assert told.usage.output_tokens == len(ANSWER)
    counted = client.messages.count_tokens(
        model="/models/fake", messages=[USER], tools=given["tools"]
    )
    assert counted.input_tokens == whole.usage.input_tokens

    def f(a: int) -> str:
        """Of a number."""
        return str(a)

    runner = client.beta.messages.tool_runner(
        model="/models/fake",
        messages=[USER],
        max_tokens=200,
        tools=[anthropic.beta_tool(f)],
        max_iterations=1,
    )
    assert runner.until_done().content[-1].input == {"a": 1}  # without a thread of the server's
    ENGINE.fail_after = 2
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        list(client.messages.create(**given, stream=True))
    ENGINE.fail_after = None

"""Real clients against one real server, with a chat template that knows tools."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from checkpoints import bundled_model_path
from tests.server.server_process import ROOT, Server, running_server

pytestmark = pytest.mark.slow

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")

CLIENTS = ROOT / "tests" / "clients"
ENVIRONMENT = ROOT / ".venv-clients"
FLAGS = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser", "qwen3")
LENGTH = ("--max-model-len", "2048")  # dspy and agents explain a lot
# Every role is one that the model knows.
TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for tool in tools or [] -%}"
    "{{- '<|system|>' ~ tool.function.name ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- for message in messages -%}"
    "{{- '<|' ~ ('user' if message.role == 'tool' else message.role) ~ '|>' -}}"
    "{{- message.content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- call.function.arguments | tojson -}}"
    "{%- endfor -%}{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
ASK = "What is the sum of two and three?"
MESSAGES: Any = [{"role": "user", "content": ASK}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
ANTHROPIC_TOOL: Any = {"name": "weather", "input_schema": PARAMETERS}


class Sum(BaseModel, extra="forbid"):
    left: Annotated[int, Field(ge=0, le=99)]
    right: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(bundled_model_path() / name)
    config = json.loads((bundled_model_path() / "tokenizer_config.json").read_text())
    text = json.dumps(config | {"chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(text)
    with running_server("none", *FLAGS, "--model", str(folder), *LENGTH) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def anthropic() -> Any:  # imported by the tests that use it: it takes seconds
    return pytest.importorskip("anthropic", reason="needs the extra `test`")


@pytest.fixture(scope="module")
def claude(server: Server, anthropic: Any) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


# -- openai ---------------------------------------------------------------------------------------


def respond(client: Any, **given: Any) -> Any:
    return client.responses.create(
        **{"model": "tiny", "input": ASK, "max_output_tokens": 100, "temperature": 0} | given
    )


def test_responses(client: Any) -> None:
    told = respond(client, instructions="Be short.")
    assert told.output_text and told.usage.output_tokens > 0
    assert told.status in ("completed", "incomplete")
    names = []
    for event in respond(client, instructions="Be short.", stream=True):
        assert event.sequence_number == len(names)
        names.append(event.type)
    assert names[:2] == ["response.created", "response.in_progress"]
    assert event.response.output_text == told.output_text
    with client.responses.stream(
        model="tiny", input=ASK, instructions="Be short.", max_output_tokens=100, temperature=0
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text


def test_a_conversation_that_the_server_keeps(client: Any) -> None:
    first = respond(client)
    second = respond(client, previous_response_id=first.id, input="And of four and five?")
    past = [
        {"role": "user", "content": ASK},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "And of four and five?"},
    ]
    assert respond(client, input=past).output_text == second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        respond(client, previous_response_id=first.id)


def test_tokens_of_a_response_are_counted(client: Any) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input=ASK, tools=[TOOL])
    assert counted.input_tokens == respond(client, tools=[TOOL]).usage.input_tokens


def test_functions_of_responses(client: Any) -> None:
    told = respond(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = told.output
    assert call.type == "function_call" and "city" in json.loads(call.arguments)
    arguments = [
        event.delta
        for event in respond(
            client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True
        )
        if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(arguments) == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    assert respond(client, input=[output], previous_response_id=told.id, tools=[TOOL]).output
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.type.*web_search"):
        respond(client, tools=[{"type": "web_search"}])


def test_a_response_is_parsed(client: Any) -> None:
    told = client.responses.parse(
        model="tiny", input=ASK, text_format=Sum, max_output_tokens=100, temperature=0
    )
    assert isinstance(told.output_parsed, Sum)


def test_a_response_in_the_background(client: Any) -> None:
    told = respond(client, background=True, extra_body={"ignore_eos": True}, max_output_tokens=200)
    assert told.status == "queued"
    assert client.responses.cancel(told.id).status in ("cancelled", "incomplete")


def test_many_at_a_time(server: Server) -> None:
    async def work() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        async def streamed() -> str:
            stream = await client.responses.create(
                model="tiny", input=ASK, max_output_tokens=20, temperature=0, stream=True
            )
            return "".join(
                [e.delta async for e in stream if e.type == "response.output_text.delta"]
            )

        texts = await asyncio.gather(*(streamed() for _ in range(6)))
        whole = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=20, temperature=0
        )
        assert set(texts) == {whole.choices[0].message.content}
        await client.close()

    asyncio.run(work())


# -- anthropic ------------------------------------------------------------------------------------


# newer clients have no argument for it
GREEDY: Any = {"extra_body": {"temperature": 0}}


def message(claude: Any, **given: Any) -> Any:
    return claude.messages.create(
        **{"model": "tiny", "messages": MESSAGES, "max_tokens": 100, **GREEDY} | given
    )


def test_messages(claude: Any, client: Any) -> None:
    told = message(claude, system="Be short.")
    (block,) = told.content
    assert block.text == respond(client, instructions="Be short.").output_text
    assert told.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(
        model="tiny", messages=MESSAGES, system="Be short.", max_tokens=100, **GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == told.usage.output_tokens > 0
    assert final.stop_reason == told.stop_reason
    end = block.text[1:3]
    cut = message(claude, system="Be short.", stop_sequences=[end])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == end


def test_tokens_of_messages_are_counted(claude: Any) -> None:
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES, tools=[ANTHROPIC_TOOL])
    told = message(claude, tools=[ANTHROPIC_TOOL])
    assert counted.input_tokens == told.usage.input_tokens


def test_fields_of_claude_code(claude: Any) -> None:
    ephemeral = {"type": "ephemeral"}
    asked: Any = {
        "model": "tiny",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "Be short.", "cache_control": ephemeral}],
        "messages": MESSAGES,
        "tools": [{**ANTHROPIC_TOOL, "cache_control": ephemeral}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "betas": ["context-management-2025-06-27", "effort-2025-11-24"],
        "metadata": {"user_id": "user_1"},
    }
    told = claude.beta.messages.create(**asked)
    assert told.context_management.applied_edits == [] and told.content
    with claude.beta.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.context_management.applied_edits == []
    assert final.usage.input_tokens == told.usage.input_tokens


def test_tools_of_messages(claude: Any) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    given = {"tools": [ANTHROPIC_TOOL], "tool_choice": choice}
    told = message(claude, **given)
    (call,) = told.content
    assert call.type == "tool_use" and set(call.input) == {"city"}
    assert told.stop_reason == "tool_use"
    with claude.messages.stream(
        model="tiny", messages=MESSAGES, max_tokens=100, **GREEDY, **given
    ) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    past = [
        *MESSAGES,
        {"role": "assistant", "content": [one.to_dict() for one in told.content]},
        {"role": "user", "content": [result]},
    ]
    assert message(claude, messages=past, tools=[ANTHROPIC_TOOL]).content


def test_anthropics_models(claude: Any) -> None:
    (model,) = claude.models.list().data
    assert model == claude.models.retrieve(model.id)
    assert (model.type, model.display_name) == ("model", model.id) and model.created_at.year >= 2026


def test_errors_of_messages(claude: Any, anthropic: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        message(claude, extra_body={"temperature": -1})
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/"}}
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]\.type='image'"):
        message(claude, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError):
        message(claude, model="other")


# -- langchain ------------------------------------------------------------------------------------


def test_langchain(server: Server) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="needs the extra `test`")
    given: Any = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    given |= {"model": "tiny", "temperature": 0}
    model = langchain_openai.ChatOpenAI(**given, max_tokens=100)
    told = model.invoke(ASK)
    assert told.content and told.usage_metadata["output_tokens"] > 0
    pieces = list(model.stream(ASK, stream_usage=True))
    assert "".join(one.content for one in pieces) == told.content
    assert any(one.usage_metadata for one in pieces)
    assert [one.content for one in model.batch([ASK, ASK])] == [told.content] * 2
    called = model.bind_tools([CHAT_TOOL], tool_choice="required").invoke(ASK)
    assert called.tool_calls[0]["name"] == "weather"
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Sum, method=method).invoke(ASK), Sum)
    items = langchain_openai.ChatOpenAI(**given, max_tokens=100, use_responses_api=True)
    assert items.invoke(ASK).text == told.content
    assert "".join(one.text for one in items.stream(ASK)) == told.content


# -- others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted(file.name for file in CLIENTS.glob("*_calls.py")))
def test_clients_that_need_an_environment_of_their_own(server: Server, script: str) -> None:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip("needs .venv-clients, which `make test-slow` makes")
    run_client(server, str(python), script)


def test_clients_of_node(server: Server) -> None:
    node, modules = shutil.which("node"), ENVIRONMENT / "node_modules"
    if node is None or not modules.exists():
        pytest.skip("needs Node and .venv-clients, which `make test-slow` makes")
    run_client(server, node, "node_calls.cjs", NODE_PATH=str(modules))


def run_client(server: Server, program: str, script: str, **variables: str) -> None:
    done = subprocess.run(
        [program, str(CLIENTS / script), server.url],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]


def test_curl(server: Server) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    body = json.dumps({"messages": MESSAGES, "max_tokens": 8, "stream": True})
    for path, end in (("chat/completions", "data: [DONE]"), ("messages", "event: message_stop")):
        done = subprocess.run(
            [curl, "-sN", f"{server.url}/v1/{path}", "--json", body],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert end in done.stdout and done.returncode == 0, done.stdout


def read_as_a_benchmark(body: Any, url: str) -> tuple[str, int]:
    """Text and number of tokens, by events that a blank line ends, without a parser of SSE."""
    text, tokens, held = "", -1, b""
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        assert response.status_code == 200
        for piece in response.iter_bytes():
            *events, held = (held + piece).split(b"\n\n")
            for event in events:
                line = event.decode().strip()
                if line.startswith(":") or line == "data: [DONE]":
                    continue
                data = json.loads(line.removeprefix("data: "))
                if data.get("choices"):
                    choice = data["choices"][0]
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                elif data.get("usage"):
                    tokens = data["usage"]["completion_tokens"]
    return text, tokens


def test_traffic_of_a_benchmark(server: Server) -> None:
    shared = {
        "model": "tiny",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": ASK, "max_tokens": 12, "logprobs": None}),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": ASK}]}],
                "max_completion_tokens": 12,
            },
        ),
    ]
    for path, body in bodies:
        text, tokens = read_as_a_benchmark(shared | body, f"{server.url}/v1/{path}")
        assert text and tokens == 12

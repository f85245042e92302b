"""Constrained output and tools of a real server, asked by the real `openai` client."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from enum import StrEnum
from typing import Annotated, Any, Literal

import jsonschema
import psutil
import pytest
from pydantic import UUID4, BaseModel, Field

from tests.server.server_process import Server, running_server
from tests.waiting import until

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")

pytestmark = pytest.mark.slow

FLAGS = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser", "qwen3")
ASK: Any = [{"role": "user", "content": "What is the sum of two and three?"}]
# with a definition that another tool has under the same name
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/short"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "string", "maxLength": 5}},
}
CLOCK = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/short"}},
    "required": ["zone"],
    "additionalProperties": False,
    "$defs": {"short": {"enum": ["UTC", "CET"]}},
}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ONE_CALL: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


class Kind(StrEnum):
    SUM = "sum"
    LIST = "list"


class Answer(BaseModel):
    kind: Kind
    value: Annotated[int, Field(ge=0, le=999)]
    words: Annotated[list[Annotated[str, Field(max_length=6)]], Field(max_length=2)]


class Round(BaseModel):
    kind: Literal["round"]
    radius: Annotated[int, Field(ge=0, le=9)]


class Square(BaseModel):
    kind: Literal["square"] = "square"
    day: date


class Record(BaseModel):
    shape: Annotated[Round | Square, Field(discriminator="kind")]
    number: UUID4
    file: Annotated[str, Field(max_length=8, json_schema_extra={"format": "file-name"})]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("none", *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": ASK, "seed": 5, "max_tokens": 150} | options
    return client.chat.completions.create(**given)


def test_parse(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Answer, seed=3, max_tokens=150
    )
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer) and parsed.choices[0].finish_reason == "stop"


def test_every_kind_over_http(client: openai.OpenAI) -> None:
    def text(**asked: Any) -> str:
        answer = client.completions.create(
            model="tiny", prompt="x", max_tokens=80, seed=1, extra_body=asked
        )
        assert answer.choices[0].finish_reason == "stop"
        return str(answer.choices[0].text)

    assert text(structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
    assert re.fullmatch(
        "[0-9]{4}-[a-f]{2}", text(structured_outputs={"regex": "[0-9]{4}-[a-f]{2}"})
    )
    assert re.fullmatch("a{1,9}", text(structured_outputs={"grammar": "start: /a{1,9}/"}))
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    jsonschema.validate(json.loads(text(response_format=asked)), schema)
    jsonschema.validate(json.loads(text(structured_outputs={"json": schema})), schema)


def check_call(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(4))
def test_a_call_is_demanded(client: openai.OpenAI, seed: int) -> None:
    choice = ask(client, seed=seed, **ONE_CALL).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    check_call(call.function.name, call.function.arguments)
    names, arguments, ids, reasons = [], "", [], []
    for chunk in ask(client, seed=seed, stream=True, **ONE_CALL):
        reasons.append(chunk.choices[0].finish_reason)
        for one in chunk.choices[0].delta.tool_calls or ():
            names += [one.function.name] if one.function.name else []
            ids += [one.id] if one.id else []
            arguments += one.function.arguments or ""
    assert names == [call.function.name] and arguments == call.function.arguments
    assert len(ids) == 1 and reasons[-1] == "tool_calls"


def test_a_function_is_named(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    choice = ask(client, tools=TOOLS, tool_choice=named).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "clock" and choice.finish_reason == "stop"
    check_call("clock", call.function.arguments)


def test_the_model_may_also_just_answer(client: openai.OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    plain = ask(client, temperature=0, messages=hello).choices[0].message
    with_tools = ask(client, temperature=0, messages=hello, tools=TOOLS).choices[0].message
    assert with_tools.content == plain.content and not with_tools.tool_calls


BAD: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "(((a{1,99}){1,99}){1,99}){1,99}b{9999}"}}, ""),
    ({"structured_outputs": {"regex": "(a|b|c){1,5000}(a+)+$"}}, ""),
    ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"] * 20_000}}, "structured_outputs.choice"),
    (
        {"structured_outputs": {"choice": [f"{i} x" * 40 for i in range(9000)]}},
        "structured_outputs.c",
    ),
    ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= "}}, ""),
    ({"structured_outputs": {"grammar": "start: " + "(" * 5000}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, ""),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "string", "pattern": "(?=a)"}},
            }
        },
        "response_format.json_schema.schema",
    ),
    (
        {
            "structured_outputs": {
                "json": {"properties": {f"p{i}": {"enum": [*range(60)]} for i in range(400)}}
            }
        },
        "",
    ),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"properties": {"a": {"type": "something"}}},
                    },
                }
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_answered_in_time(server: Server, fields: dict[str, Any], param: str) -> None:
    body = {"messages": ASK, "max_tokens": 5} | fields
    begin = time.monotonic()
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert time.monotonic() - begin < 5.0
    if param:  # what is empty compiles, and is served
        assert response.status_code == 400, response.text[:300]
        error = response.json()["error"]
        assert error["param"].startswith(param) and len(error["message"]) < 800
    else:
        assert response.status_code in (200, 400), response.text[:300]
    assert server.health() == 200
    server.wait_until_idle()


def test_a_keyword_that_is_refused_is_named_with_its_place(server: Server) -> None:
    schema = {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": ASK, "max_tokens": 5, "response_format": form}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "response_format.json_schema.schema"
    assert "'#/properties/tags/uniqueItems'" in error["message"]
    assert "{'properties': {'tags'" in error["message"]


def test_a_model_of_many_types_is_answered_and_what_has_no_meaning_is_logged(
    server: Server, client: openai.OpenAI
) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=ASK, seed=5, max_tokens=150, response_format=Record
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Record)
    assert "any text passes for format 'file-name'" in "".join(server.lines)


INTERSECTION = "start: A\nA: " + " & ".join(rf"/(.|\n)*[a-z]{{{n}}}(.|\n)*/" for n in range(1, 60))
PATTERNS = [{"type": "string", "pattern": f"[a-z]{{{n}}}"} for n in range(1, 60)]


def endless(number: int) -> tuple[dict[str, Any], str]:
    """A constraint whose compilation takes time and memory without end, and its field."""
    if number % 2:
        grammar = INTERSECTION + "\n" * number
        return {"structured_outputs": {"grammar": grammar}}, "structured_outputs.grammar"
    schema = {"allOf": PATTERNS, "description": str(number)}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"response_format": form}, "response_format.json_schema.schema"


def test_grammars_without_end_are_refused_and_hold_up_no_other(server: Server) -> None:
    def send(fields: dict[str, Any]) -> Any:
        body = {"messages": ASK, "max_tokens": 40} | fields
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)

    def memory() -> int:
        """Of the server and its engine, which live on; not of what is tried."""
        parent = psutil.Process(server.process.pid)
        children = parent.children(recursive=True)
        (engine,) = (one for one in children if "jaxserve.isolation.child" in one.cmdline())
        return int(parent.memory_info().rss + engine.memory_info().rss)

    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    others = [
        {"structured_outputs": {"json": schema | {"maxItems": 3 + number}}} for number in range(3)
    ]
    assert send(others[0]).status_code == 200
    before = memory()
    with ThreadPoolExecutor(13) as pool:
        hostile = [(pool.submit(send, fields), name) for fields, name in map(endless, range(10))]
        beside = [pool.submit(send, fields) for fields in others]
        for one in beside:
            assert one.result().status_code == 200, one.result().text
        for future, name in hostile:
            answer = future.result()
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == name and "a constraint that compiles in" in error["message"]
    assert memory() - before < 50 << 20
    assert server.health() == 200
    server.wait_until_idle()


def test_a_text_that_costs_too_much_ends_and_others_go_on(server: Server) -> None:
    grammar = "start: x\nx: /[a-z]/ | x x | x x x | x x x x\n"
    body = {"messages": ASK, "max_tokens": 200, "ignore_eos": True, "seed": 1}
    body["structured_outputs"] = {"grammar": grammar}
    url = f"{server.url}/v1/chat/completions"
    plain = {"messages": ASK, "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        costly = pool.submit(httpx.post, url, json=body, timeout=120)
        other = pool.submit(httpx.post, url, json=plain, timeout=120)
        assert other.result().status_code == 200
        assert costly.result().status_code == 400, costly.result().text[:300]
    assert costly.result().json()["error"]["param"] == "structured_outputs"
    server.wait_until_idle()


def test_a_server_that_stops_waits_for_no_grammar_without_end() -> None:
    with running_server("none") as server, ThreadPoolExecutor(20) as pool:
        url = f"{server.url}/v1/chat/completions"

        def send(number: int) -> int:
            body = {"messages": ASK} | endless(number)[0]
            return httpx.post(url, json=body, timeout=120).status_code

        sent = [pool.submit(send, number) for number in range(20)]

        def trials() -> int:
            words = [" ".join(one.cmdline()) for one in tree(server)]
            return sum("grammars.trial_process" in one for one in words)

        until(lambda: trials() >= 5)
        processes = tree(server)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)  # of the 30 s that running requests have
        assert {one.result() for one in sent} <= {400, 503}
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive


def tree(server: Server) -> list[psutil.Process]:
    """The processes of a server, but for itself."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_every_beam_holds_to_the_schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    body = {"messages": ASK, "max_tokens": 60, "n": 3, "use_beam_search": True}
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json=body | {"response_format": form}, timeout=120
    )
    assert response.status_code == 200, response.text[:300]
    texts = [one["message"]["content"] for one in response.json()["choices"]]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), WEATHER)
    server.wait_until_idle()


@pytest.mark.parametrize("budget", [0, 3])
def test_thoughts_end_at_their_budget(server: Server, budget: int) -> None:
    body = {"prompt": "Two and three are <think>", "max_tokens": 20, "ignore_eos": True}
    body |= {"thinking_token_budget": budget, "seed": 1, "return_token_ids": True}
    body |= {"temperature": 1.0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text[:300]
    (choice,) = response.json()["choices"]
    end = {"prompt": "</think>", "add_special_tokens": False}
    tag = httpx.post(f"{server.url}/tokenize", json=end).json()["tokens"]
    assert choice["token_ids"][budget : budget + len(tag)] == tag
    assert len(choice["token_ids"]) == 20

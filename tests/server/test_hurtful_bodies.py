"""Bodies that cost more than their bytes: refused before the work is done, or done aside."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from random import Random
from typing import Any

import pytest
from starlette.testclient import TestClient

from server import body_reader as bodies
from server.app import create_app
from server.body_reader import KEY, MAX_CONTAINERS, MAX_WEIGHT
from server.client_limits import Limits
from server.errors import ApiError
from server.protocol.responses import dumped_in_pieces
from tests.server.fake_engine import FakeEngine
from tests.server.test_errors import CHAT, COMPLETIONS, JSON, OK_CHAT, assert_error
from tests.server.test_event_stream import Connection, wait_for


def test_messages_are_counted_before_they_are_looked_at(client: TestClient) -> None:
    body = b'{"messages":[' + b'{"role":""},' * 40_000 + b'{"role":""}]}'
    begin = time.monotonic()
    for path in (CHAT, "/tokenize"):
        message = assert_error(client.post(path, content=body, headers=JSON), 400, "messages")
        assert "2048" in message
    assert time.monotonic() - begin < 1


def test_parts_are_counted(client: TestClient) -> None:
    part = {"type": "text", "text": ""}
    messages = [{"role": "user", "content": [part] * 1025}] * 2
    assert "2050 parts" in assert_error(
        client.post(CHAT, json={"messages": messages}), 400, "messages"
    )


def test_roles_and_names_are_short(client: TestClient) -> None:
    for message in ({"role": "x" * 65}, {"role": "user", "name": "x" * 1025}):
        assert_error(client.post(CHAT, json={"messages": [message]}), 400, "messages")


@pytest.mark.parametrize(
    "value",
    [
        "[" + "[]," * MAX_CONTAINERS + "[]]",
        "[" + "1," * MAX_WEIGHT + "1]",
        "[" + '"a",' * (MAX_WEIGHT // 3) + "1]",
        "{" + ",".join(f'"{i:x}" : 1' for i in range(300_000)) + "}",
        "[" + f"{10**19}," * (MAX_WEIGHT // 8) + "1]",
    ],
    ids=["lists", "numbers", "texts", "keys", "digits"],
)
def test_what_holds_the_interpreter_is_counted_before_it_is_parsed(
    client: TestClient, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.body_reader.from_json", None)
    body = '{"prompt": "a", "x": ' + value + "}"
    message = assert_error(client.post(COMPLETIONS, content=body, headers=JSON), 400)
    assert str(MAX_WEIGHT) in message


@pytest.mark.parametrize(
    "value",
    [
        '[{}]:, "1": 2, \\\\' * 2**17,
        list(range(131_072)),
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8}] * 2048,
    ],
    ids=["text", "ids", "messages"],
)
def test_large_bodies_that_people_send_are_let_in(value: Any) -> None:
    raw = json.dumps({"prompt": value}).encode()
    assert bodies._parsed(raw) == {"prompt": value}


def test_weights_are_exact_wherever_a_body_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(0)

    def made(depth: int) -> Any:
        kind = random.randrange(6 if depth else 3)
        if kind < 2:
            return "".join(random.choices('\\"[{,:}] a\n', k=random.randrange(6)))
        if kind == 2:
            return random.randrange(100)
        if kind == 3:
            return {made(0) if i else "\\": made(depth - 1) for i in range(random.randrange(3))}
        return [made(depth - 1) for _ in range(random.randrange(4))]

    def weight(value: Any) -> int:
        if isinstance(value, str):
            return 2
        if isinstance(value, dict):
            inner = sum(2 + KEY + weight(one) for one in value.values())
            return inner + 1 + max(0, len(value) - 1)
        if isinstance(value, list):
            return sum(map(weight, value)) + 1 + max(0, len(value) - 1)
        return 0

    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(bodies, "COUNTED_AT_A_TIME", size)
        for _ in range(40):
            value = {"a": made(4), "b": '\\"\\'}
            raw = json.dumps(value, separators=random.choice([(",", ":"), (" , ", " : ")])).encode()
            monkeypatch.setattr(bodies, "MAX_WEIGHT", weight(value))
            bodies._check_weight(raw)
            monkeypatch.setattr(bodies, "MAX_WEIGHT", weight(value) - 1)
            with pytest.raises(ApiError):
                bodies._check_weight(raw)


def test_lists_of_values_that_are_looked_at_are_short(client: TestClient) -> None:
    body = {"prompt": "a", "logit_bias": {str(i): 1 for i in range(2049)}}
    message = assert_error(client.post(COMPLETIONS, json=body), 400, "logit_bias")
    assert "2048" in message


@pytest.mark.parametrize(("size", "is_large"), [(2**16, False), (2**16 + 1, True)])
def test_large_bodies_are_parsed_beside_the_loop_one_at_a_time(
    engine: FakeEngine, size: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile, and the second body waits for the first."""
    parsing: list[str] = []
    loop_is_free = threading.Event()
    at_once: list[int] = []

    def parse(raw: bytes, **options: Any) -> Any:
        parsing.append(threading.current_thread().name)
        at_once.append(sum(one.startswith("jaxserve-bodies") for one in parsing))
        assert gc.isenabled() != is_large
        if is_large:
            assert loop_is_free.wait(10), "the event loop waits for the parser"
        try:
            return json.loads(raw)
        finally:
            if is_large:
                parsing.remove(threading.current_thread().name)

    monkeypatch.setattr("server.body_reader.from_json", parse)

    async def main() -> None:
        app = create_app(engine)
        empty = len(json.dumps({"prompt": ""}))
        both = [Connection(COMPLETIONS, {"prompt": "a" * (size - empty)}) for _ in "ab"]
        calls = [asyncio.create_task(app(one.scope, one.receive, one.send)) for one in both]
        await wait_for(lambda: parsing)
        loop_is_free.set()
        await asyncio.gather(*calls)
        for one in both:
            assert one.sent[0]["status"] in (200, 400)  # the prompt may be too long

    asyncio.run(main())
    assert gc.isenabled()
    if is_large:
        assert at_once == [1, 1]
    else:
        assert set(parsing) == {threading.main_thread().name}


def test_bodies_share_a_bound(engine: FakeEngine) -> None:
    """Two that are read at a time; each alone would be served."""

    async def main() -> None:
        app = create_app(engine, limits=Limits(max_body_bytes=1000, max_pending_body_bytes=1000))
        slow, other = (Connection(COMPLETIONS, {"prompt": "a" * 20, "x": "y" * 600}) for _ in "ab")
        more = asyncio.Event()

        async def in_pieces() -> dict[str, Any]:
            await more.wait()
            return await slow.receive()

        async def first_piece() -> dict[str, Any]:
            receive.remove(first_piece)
            return {"type": "http.request", "body": b" " * 600, "more_body": True}

        receive: list[Any] = [first_piece, in_pieces]
        call = asyncio.create_task(app(slow.scope, lambda: receive[0](), slow.send))
        await wait_for(lambda: app.state.service.bodies.pending)
        await app(other.scope, other.receive, other.send)
        assert other.sent[0]["status"] == 503
        assert dict(other.sent[0]["headers"])[b"retry-after"] == b"1"
        more.set()
        await call
        assert slow.sent[0]["status"] == 413, "600 and more than 600 bytes"
        assert app.state.service.bodies.pending == 0
        again = Connection(COMPLETIONS, {"prompt": "a"})
        await app(again.scope, again.receive, again.send)
        assert again.sent[0]["status"] == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"echo": True}, "echo"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
def test_what_is_said_of_prompts_is_bounded(
    engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    """Before anything is generated."""
    with TestClient(create_app(engine, limits=Limits(max_response_entries=1000))) as client:
        body = {"prompt": [[5] * 40] * 2, "n": 16, "max_tokens": 1, **fields}
        message = assert_error(client.post(COMPLETIONS, json=body), 400, field)
        assert "1000" in message and not engine.started
        small = client.post(COMPLETIONS, json={**body, "prompt": [5, 6], "n": 2})
        assert small.status_code == 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream": True, "return_token_ids": True}, "return_token_ids"),
        ({"stream": True, "return_prompt_text": True}, "return_prompt_text"),
        ({"echo": True, "add_generation_prompt": False, "continue_final_message": True}, "echo"),
    ],
)
def test_what_each_choice_of_a_chat_says_of_its_prompt_is_bounded(
    engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    with TestClient(create_app(engine, limits=Limits(max_response_entries=200))) as client:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 9}]
        body = {"messages": messages, "n": 16, "max_tokens": 1, **fields}
        assert "200" in assert_error(client.post(CHAT, json=body), 400, field)
        assert not engine.started
        assert client.post(CHAT, json={**body, "n": 2}).status_code == 200


def test_choices_are_bounded(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, limits=Limits(max_choices=8))) as client:
        assert_error(client.post(COMPLETIONS, json={"prompt": "a", "n": 9}), 400, "n")
        assert_error(client.post(COMPLETIONS, json={"prompt": ["a"] * 3, "n": 3}), 400, "n")
        assert_error(client.post(COMPLETIONS, json={"prompt": ["a"] * 9}), 400, "prompt")
        assert client.post(COMPLETIONS, json={"prompt": "a", "n": 8}).status_code == 200
    with TestClient(create_app(FakeEngine())) as client:
        assert_error(client.post(COMPLETIONS, json={"prompt": "a", "n": 1025}), 400, "n")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_large_responses_are_made_beside_the_loop_and_are_the_same(
    engine: FakeEngine, client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reply = "hello"
    body = {**OK_CHAT, "prompt": [[5, 6, 7], [8, 9]], "n": 3, "max_tokens": 5, "seed": 1}
    if path == COMPLETIONS:
        body |= {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}
    else:
        body |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    headers = {"x-request-id": "same"}
    threads = set()
    monkeypatch.setattr("server.answers.time.time", lambda: 1)

    def ask() -> Any:
        return client.post(path, json=body, headers=headers)

    whole = ask()
    monkeypatch.setattr("server.answers.QUICK_ENTRIES", 0)
    monkeypatch.setattr("server.protocol.responses.PIECE", 2)
    real = dumped_in_pieces

    def noted(value: Any) -> Any:
        threads.add(threading.current_thread().name)
        return real(value)

    monkeypatch.setattr("server.whole_answer.dumped_in_pieces", noted)
    piecewise = ask()
    assert whole.status_code == 200 and piecewise.json() == whole.json()
    assert piecewise.headers["content-type"] == whole.headers["content-type"]
    assert len(threads) == 1 and "asyncio" in threads.pop()


@pytest.mark.parametrize("value", [{}, [], [[]], {"a": []}, [{}], [1] * 300, [{"a": [1] * 600}]])
def test_pieces_join_to_the_same_json(value: Any) -> None:
    assert json.loads(b"".join(dumped_in_pieces(value))) == value


def test_detokenize_has_a_limit(client: TestClient) -> None:
    body = {"tokens": [65] * 65}
    assert "65 tokens" in assert_error(client.post("/detokenize", json=body), 400, "tokens")


@pytest.mark.parametrize("name", ["self", "bos_token", "tokenize", "documents"])
def test_variables_of_templates_that_are_not_the_clients(client: TestClient, name: str) -> None:
    for path in (CHAT, "/tokenize"):
        body = {**OK_CHAT, "chat_template_kwargs": {name: 1}}
        assert name in assert_error(client.post(path, json=body), 400, "chat_template_kwargs")
    body = {**OK_CHAT, "chat_template_kwargs": {f"v{i}": 1 for i in range(65)}}
    assert_error(client.post(CHAT, json=body), 400, "chat_template_kwargs")


def test_max_completion_tokens_beats_max_tokens(client: TestClient, engine: FakeEngine) -> None:
    body = {**OK_CHAT, "max_tokens": 5, "max_completion_tokens": 2}
    assert client.post(CHAT, json=body).status_code == 200
    assert engine.limits == [2]


@pytest.mark.parametrize("allowed", [False, True])
def test_control_tokens_are_marked_unless_they_are_allowed(
    engine: FakeEngine, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[bool] = []
    real = type(engine.tokenizer).render_chat

    def noted(self: Any, *args: Any, **options: Any) -> str:
        marked.append(options["mark"])
        return real(self, *args, **options)

    monkeypatch.setattr(type(engine.tokenizer), "render_chat", noted)
    with TestClient(create_app(engine, limits=Limits(allow_control_tokens=allowed))) as client:
        for path in (CHAT, "/tokenize"):
            assert client.post(path, json=OK_CHAT).status_code == 200
    assert marked == [not allowed] * 2

"""`jaxserve chat`: the conversation, and its two ways to get an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.errors import ValidationError
from server.app import create_app
from server.cli import main
from server.commands.chat import Message, converse
from server.keys import ApiKey
from tests.server.fake_engine import FakeEngine
from tests.server.test_connection import serving


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `input` answer with these lines, then end of input; exceptions are raised."""

    def typed(*lines: str | type[BaseException]) -> None:
        remaining = iter([*lines, EOFError])

        def next_line(prompt: str) -> str:
            line = next(remaining)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", next_line)

    return typed


def test_history_grows_and_blank_lines_do_not_count(
    type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[Message]] = []

    def reply(messages: list[Message]) -> Iterator[str]:
        seen.append([dict(message) for message in messages])
        yield from ("an", "swer")

    type_lines("one", "  ", "two")
    converse(reply, [{"role": "system", "content": "be brief"}])
    assert [[m["content"] for m in messages] for messages in seen] == [
        ["be brief", "one"],
        ["be brief", "one", "answer", "two"],
    ]
    assert capsys.readouterr().out == "answer\nanswer\n\n"


def test_ctrl_c_ends_an_answer_and_then_the_conversation(type_lines: Any) -> None:
    history: list[Message] = []

    def reply(messages: list[Message]) -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    type_lines("one", KeyboardInterrupt, "never read")
    converse(reply, history)
    assert [message["content"] for message in history] == ["one", "half"]


def test_a_refused_turn_is_taken_back(type_lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    history: list[Message] = []

    def reply(messages: list[Message]) -> Iterator[str]:
        if len(messages[-1]["content"]) > 3:
            raise ValidationError("messages", "long", "short ones")
        yield "ok"

    type_lines("much too long", "hi")
    converse(reply, history)
    assert [message["content"] for message in history] == ["hi", "ok"]
    assert "short ones" in capsys.readouterr().err


@pytest.fixture
def server() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine("héllo 😀", served_model_name=("fake",))
    app = create_app(engine, api_keys=[ApiKey("key", "a")])
    with serving(app) as port:
        yield engine, f"http://127.0.0.1:{port}"


def test_chat_with_a_server(
    server: tuple[FakeEngine, str], type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, url = server
    type_lines("hi", "more")
    words = ["--url", url + "/v1/", "--api-key", "key", "--max-tokens", "7", "--model", "fake"]
    assert main(["chat", *words, "--system-prompt", "s"]) == 0
    assert capsys.readouterr().out == "héllo 😀\nhéllo 😀\n\n"
    assert engine.params[0].max_tokens == 7
    last = engine.tokenizer.decode(engine.prompts[-1])
    assert last == "[system]s[user]hi[assistant]héllo 😀[user]more[assistant]"


def test_what_the_server_says_is_shown(
    server: tuple[FakeEngine, str], type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, url = server
    type_lines("hi")
    assert main(["chat", "--url", url, "--api-key", "wrong"]) == 0
    assert "API key" in capsys.readouterr().err
    engine.fail_after = 2
    type_lines("hi")
    assert main(["chat", "--url", url, "--api-key", "key"]) == 0
    assert "engine has stopped" in capsys.readouterr().err
    type_lines("hi")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 0
    assert "refused" in capsys.readouterr().err
    assert main(["chat", "--url", "ftp://x"]) == 1

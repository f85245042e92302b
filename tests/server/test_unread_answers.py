"""Answers that are not read: written in pieces, counted together, the slowest reader cut off."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from server import unread_answers
from server.app import create_app
from server.client_limits import Limits
from server.connection import Connection as RealConnection
from server.keys import ApiKey
from server.unread_answers import PIECE_BYTES, UNCOUNTED_BYTES, UnreadAnswer, UnreadAnswers
from tests.server.fake_engine import FakeEngine
from tests.server.server_process import running_server
from tests.server.test_connection import serving
from tests.server.test_errors import assert_error
from tests.server.test_event_stream import COMPLETIONS, Connection, wait_for
from tests.server.test_many_connections import connect, post
from tests.waiting import until

# choices that each tell the same of their prompt
MANY = {"prompt": [5] * 1900, "prompt_logprobs": 20, "n": 25, "max_tokens": 1}
SOME = {**MANY, "prompt": [5] * 600}  # 0.7 MB each


class Pipe:
    """A connection's transport, whose client takes nothing by itself."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes, self.aborted = num_bytes, False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.num_bytes, self.aborted = 0, True


def test_the_slowest_reader_is_cut_off_where_all_is_too_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        now = [0.0]
        answers = UnreadAnswers(100_000, lambda: now[0])
        pipes = [Pipe(UNCOUNTED_BYTES + 1), Pipe(), Pipe(), Pipe()]
        waiting = [UnreadAnswer(answers, pipe) for pipe in pipes]  # type: ignore[arg-type]
        for second, answer in enumerate(waiting):
            now[0] = second
            answer.keep(20_000)
            answers.tells(answer)
        answers.look()
        assert answers.num_bytes == 80_000 + UNCOUNTED_BYTES + 1 <= 100_000
        assert not any(pipe.aborted for pipe in pipes)
        now[0] = 5.0
        pipes[0].num_bytes -= 1  # the oldest takes something, the second nothing
        answers.look()
        waiting[2].queued = lambda: 10_000
        answers.look()
        assert [pipe.aborted for pipe in pipes] == [False, True, False, False]
        assert "nothing for 4.0 s, with 20000" in caplog.text
        assert "more than --max-unread-answer-bytes 100000" in caplog.text
        for answer in waiting:
            answer.whole = 0
        answers.look()
        # the first's connection still holds as much as any may
        assert answers.num_bytes == 0 and answers._watched == set()

    with caplog.at_level(logging.WARNING, "jaxserve.server"):
        asyncio.run(main())


def test_many_answers_to_one_client_cost_no_other_its_own() -> None:
    async def main() -> None:
        now, most = [0.0], 100 * PIECE_BYTES
        answers = UnreadAnswers(most, lambda: now[0])

        def answer_to(client: str, held: int = 0) -> UnreadAnswer:
            return UnreadAnswer(answers, Pipe(held), lambda: client)  # type: ignore[arg-type]

        paused, many = answer_to("a", 2 * PIECE_BYTES), [answer_to("b") for _ in range(4)]
        made, small = answer_to("c"), answer_to("b", UNCOUNTED_BYTES + 1)
        answers.tells(paused)
        answers.tells(small)
        now[0] = 1.0
        for answer in many:
            answer.keep(most // 4)
            answers.tells(answer)
        for _ in range(8):
            now[0] += 0.25
            made.keep(PIECE_BYTES)
            for answer in many[1:]:  # of each its client takes a piece now and then
                answers.took(answer)
        answers.look()
        cut = [one.transport.aborted for one in (paused, made, small, *many)]  # type: ignore[union-attr]
        assert cut == [False, False, False, True, False, False, False]

    asyncio.run(main())


def test_an_answer_is_not_slow_while_it_is_made() -> None:
    async def main() -> None:
        now = [0.0]
        answers = UnreadAnswers(100_000, lambda: now[0])
        made, told = (UnreadAnswer(answers, Pipe()) for _ in range(2))  # type: ignore[arg-type]
        made.keep(60_000)
        now[0] = 1.0
        told.keep(60_000)
        answers.tells(told)
        now[0] = 9.0
        answers.tells(made)
        answers.look()
        assert told.transport.aborted and not made.transport.aborted  # type: ignore[union-attr]

    asyncio.run(main())


def test_the_client_of_an_answer_is_known_by_its_key() -> None:
    async def look(stuck: Stuck, service: Any, engine: FakeEngine) -> None:
        (answer,) = service.unread._watched
        assert answer.client() == "key:search"

    keys = (ApiKey("secret", "search"),)
    with_stuck({"prompt": "a"}, Limits(), look, api_keys=keys)


class Stuck(Connection):
    """Takes nothing of an answer before it is told to."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(COMPLETIONS, body)
        self.reads, self.is_sent = asyncio.Event(), False
        self.pipe = Pipe()
        self.scope["state"] = {"transport": self.pipe}

    async def send(self, message: dict[str, Any]) -> None:
        self.is_sent = True
        await self.reads.wait()
        await super().send(message)


def with_stuck(
    body: dict[str, Any],
    limits: Limits,
    look: Callable[[Stuck, Any, FakeEngine], Any],
    api_keys: Sequence[ApiKey] = (),
) -> None:
    """Look at an application whose answer is not taken, then take it."""

    async def main() -> None:
        engine = FakeEngine(max_model_len=2048)
        app = create_app(engine, limits=limits, api_keys=api_keys)
        stuck = Stuck(body)
        stuck.scope["headers"] += [(b"x-api-key", one.key.encode()) for one in api_keys]
        call = asyncio.create_task(app(stuck.scope, stuck.receive, stuck.send))
        service = app.state.service
        await wait_for(lambda: stuck.is_sent)
        await look(stuck, service, engine)
        stuck.reads.set()
        await call
        assert service.unread.num_bytes == 0

    asyncio.run(main())


def test_a_large_answer_is_written_in_pieces_and_kept_once() -> None:
    async def look(stuck: Stuck, service: Any, engine: FakeEngine) -> None:
        await wait_for(lambda: service.unread.num_bytes > 300_000)
        stuck.reads.set()
        await wait_for(lambda: stuck.sent and stuck.sent[-1].get("body") == b"")
        start, *pieces = stuck.sent
        text = b"".join(piece["body"] for piece in pieces)
        assert max(len(piece["body"]) for piece in pieces) <= PIECE_BYTES
        assert dict(start["headers"])[b"content-length"] == b"%d" % len(text)
        choices = json.loads(text)["choices"]
        assert len(choices) == 10 and len(choices[9]["prompt_logprobs"]) == 300
        assert choices[0]["prompt_logprobs"] == choices[9]["prompt_logprobs"]
        sizes.append((service.unread.most, len(text)))

    sizes: list[tuple[int, int]] = []
    few = {**SOME, "prompt": [5] * 300, "n": 10}
    with_stuck(few, Limits(max_unread_answer_bytes=600_000), look)
    assert sizes[0][1] > 5 * sizes[0][0], "what the choices have in common is there once"


def test_an_answer_larger_than_all_may_be_is_refused() -> None:
    limits = Limits(max_response_entries=10**7, max_unread_answer_bytes=100_000)
    with TestClient(create_app(FakeEngine(max_model_len=2048), limits=limits)) as client:
        response = client.post(COMPLETIONS, json=SOME)
        assert "--max-unread-answer-bytes" in assert_error(response, 400)
        assert client.app.state.service.unread.num_bytes == 0  # type: ignore[attr-defined]


def test_small_answers_and_what_waits_in_streams_count_too() -> None:
    async def small(stuck: Stuck, service: Any, engine: FakeEngine) -> None:
        assert 200 < service.unread.num_bytes < 1000

    async def stream(stuck: Stuck, service: Any, engine: FakeEngine) -> None:
        (request_id,) = engine.started
        begin = service.unread.num_bytes
        engine.unread[request_id] = 300_000
        assert service.unread.num_bytes == begin + 300_000
        service.unread.look()
        assert stuck.pipe.aborted
        stuck.gone.set()

    with_stuck({"prompt": "a"}, Limits(), small)
    body = {"prompt": "a", "stream": True}
    with_stuck(body, Limits(max_unread_answer_bytes=200_000), stream)


def test_what_a_prompt_says_of_itself_in_many_choices_is_bounded_by_default() -> None:
    assert Limits().max_response_entries == 128 * 1024
    assert Limits().max_unread_answer_bytes == 256 * 2**20
    with TestClient(create_app(FakeEngine(max_model_len=2048))) as client:
        message = assert_error(client.post(COMPLETIONS, json=MANY), 400, "prompt_logprobs")
        assert "131072" in message


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sockets: the other's answer, of any HTTP, is whole."""
    monkeypatch.setattr(unread_answers, "LOOK_S", 0.02)
    limits = Limits(max_response_entries=10**7, max_unread_answer_bytes=1_200_000)
    app = create_app(FakeEngine(max_model_len=2048), limits=limits)
    with serving(app, RealConnection.limited(limits)) as port:
        idle = socket.socket()
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.settimeout(10)
        idle.connect(("127.0.0.1", port))
        idle.sendall(post(**SOME))
        watched = app.state.service.unread
        # whole, and the system takes no more of it: from then on its client takes nothing
        until(lambda: watched.num_bytes >= 600_000, 10)
        until(lambda: all(one.in_transport for one in watched._watched), 10)
        (slowest,) = watched._watched
        with connect(port) as old:  # which knows no chunks
            old.sendall(post(**SOME).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            # both are unread until one of them is cut off
            until(lambda: slowest not in watched._watched, 10)
            received = b"".join(iter(lambda: old.recv(2**20), b""))
        head, _, text = received.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(text) in head.lower() and b"chunked" not in head
        assert len(json.loads(text)["choices"]) == 25
        received = b"".join(iter(lambda: idle.recv(2**20), b""))
        assert len(received) < len(text), "it has ended before it was whole"
        idle.close()
        until(lambda: not watched.num_bytes, 10)


def rss_mib(pid: int) -> float:
    line = next(
        one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in one
    )
    return int(line.split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_ten_large_answers_that_nobody_reads() -> None:
    flags = ("--max-model-len", "2048", "--max-response-entries", "2000000")
    with running_server("none", *flags) as server:
        for _ in range(3):
            httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 2})
        before = rss_mib(server.process.pid)
        port = httpx.URL(server.url).port or 0
        clients = [connect(port) for _ in range(10)]
        for client in clients:
            client.sendall(post(**MANY).replace(b"Host: x", b"Host: localhost", 1))
        for client in clients:
            client.settimeout(120)
            client.recv(1, socket.MSG_PEEK)
        server.wait_until_idle()
        time.sleep(1)
        assert rss_mib(server.process.pid) - before < 300
        heads = [client.recv(4096).partition(b"\r\n\r\n")[0] for client in clients]
        sizes = [int(head.lower().partition(b"content-length: ")[2].split()[0]) for head in heads]
        assert len({*sizes}) == 1 and sizes[0] > 60_000_000
        for client in clients:
            client.close()
        until(lambda: rss_mib(server.process.pid) - before <= 50, 30)

"""Processes of one engine find each other, and what is no part of it is turned away."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.boundary.messages import Action, Control
from jaxserve.boundary.process_messages import Join, Joined, RunCommand
from jaxserve.errors import EngineDeadError, JaxServeError
from jaxserve.processes import joining, link
from jaxserve.processes.joining import gather, join
from jaxserve.processes.network import free_port
from jaxserve.processes.wire import StartRefusal

HOST, TOKEN = "127.0.0.1", b"a secret"
OTHER = Join(1, {"jax": "0.10.2"}, {"num_processes": "2", "seed": "0"})
FIRST = replace(OTHER, process_id=0)


class Side(threading.Thread):
    """Calls a function in a thread; what it gave, or raised."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self.call, self.given = call, None
        self.start()

    def run(self) -> None:
        try:
            self.given = self.call()
        except JaxServeError as error:
            self.given = error

    def ended(self) -> Any:
        self.join(5)
        assert not self.is_alive()
        return self.given


def both(
    other: Join = OTHER, token: bytes = TOKEN, seconds: float = 3.0, count: int = 2
) -> tuple[Any, Any, list[str]]:
    """What process 0 and another one get of each other, and what was lost of it."""
    lost: list[str] = []
    address = HOST, free_port(HOST)
    side = Side(lambda: join(address, other, token, lost.append, seconds=seconds))
    try:
        found: Any = gather(address, count, FIRST, TOKEN, lost.append, seconds=seconds)
        found[1].send(Joined("h:1"))
    except JaxServeError as error:
        found = error
    with socket.socket() as again:
        assert again.connect_ex(address) != 0, "nothing listens any more"
    return found, side.ended(), lost


def until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_that_are_alike_talk_and_notice_an_end() -> None:
    found, (other, joined), lost = both()
    assert joined == Joined("h:1")
    found[1].send(RunCommand("p", b"\x01"))
    assert other.receive() == RunCommand("p", b"\x01")
    other.close()
    until(lambda: lost)
    assert lost == ["process 1 was lost: its connection has ended"], "one side alone was lost"
    for call in (found[1].receive, lambda: found[1].send(Joined(""))):
        with pytest.raises(EngineDeadError, match="process 1 was lost"):
            call()


def test_an_end_in_good_order_is_no_loss() -> None:
    found, (other, _), lost = both()
    for body in (RunCommand("p", b""), Control(Action.CLOSE)):
        found[1].send(body)
    found[1].close()
    assert [other.receive(), other.receive()] == [RunCommand("p", b""), Control(Action.CLOSE)]
    with pytest.raises(EngineDeadError, match="the link to process 0 is closed"):
        other.receive()
    assert lost == []


def test_an_error_of_another_process_is_told_at_once() -> None:
    found, (other, _), lost = both()
    other.send(StartRefusal("no memory"))
    until(lambda: "process 1: no memory" in lost)
    with pytest.raises(EngineDeadError, match="process 1: no memory"):
        found[1].receive()


def test_a_process_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LOST_S", 0.6)
    monkeypatch.setattr(link, "BEATS", 1000)
    _, _, lost = both()
    until(lambda: len(lost) == 2)
    assert "process 1 was lost: it was silent" in "".join(lost)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            replace(OTHER, versions={"jax": "0.9"}),
            "jax: process 1 has 0.9 and process 0 has 0.10.2",
        ),
        (
            replace(OTHER, settings=OTHER.settings | {"num_processes": "3"}, process_id=2),
            "num_processes: process 2 has 3 and process 0 has 2",
        ),
        (replace(OTHER, settings={}), "num_processes: process 1 has none"),
        (replace(OTHER, process_id=0), "process_id=0: that process is there already"),
    ],
)
def test_a_process_that_differs_is_refused_on_both_sides(other: Join, text: str) -> None:
    found, given, _ = both(other)
    assert isinstance(found, JaxServeError) and text in str(found)
    assert isinstance(given, JaxServeError) and text in str(given)


def test_a_process_without_the_secret_is_turned_away() -> None:
    found, given, _ = both(token=b"another", seconds=0.5)
    assert "process_token_file" in str(given) and "has another secret" in str(given)
    assert "no process 1 came within 0 s (1 turned away" in str(found)


def test_a_process_that_does_not_come_ends_the_others() -> None:
    found, given, _ = both(count=3, seconds=0.5)
    assert str(found) == "num_processes=3: no process 2 came within 0 s"
    assert str(given) == f"process 0: {found}"


def test_strangers_change_nothing() -> None:
    address = HOST, free_port(HOST)
    side = Side(lambda: gather(address, 2, FIRST, TOKEN, lambda why: None, seconds=3.0))
    strangers = []
    while len(strangers) < 2:
        try:
            strangers.append(socket.create_connection(address))
        except OSError:
            time.sleep(0.01)
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    Side(lambda: join(address, OTHER, TOKEN, lambda why: None))
    assert list(side.ended()) == [1], "one stranger said nonsense, the other one nothing"
    for one in strangers:
        one.close()


def test_strangers_who_drip_or_are_many_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "HELLO_S", 1.0)
    monkeypatch.setattr(joining, "MOST_UNPROVEN", 2)
    address = HOST, free_port(HOST)
    side = Side(lambda: gather(address, 2, FIRST, TOKEN, lambda why: None, seconds=4.0))
    strangers: list[socket.socket] = []

    def came() -> bool:
        with suppress(OSError):
            strangers.append(socket.create_connection(address))
        return len(strangers) == 3

    until(came)
    assert strangers[2].recv(1) == b"", "beyond the two that are greeted"

    count = 0
    with suppress(ConnectionError):
        while count < 64:  # bytes of an answer
            strangers[0].send(b"x")
            count += 1
            time.sleep(0.05)
    assert count < 64, "each byte came in time, all together did not"
    Side(lambda: join(address, OTHER, TOKEN, lambda why: None))
    assert list(side.ended()) == [1]


def test_a_failure_of_one_connection_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, start = socket.socket.accept, threading.Thread.start
    failed: list[str] = []

    def failing_accept(listener: socket.socket) -> Any:
        if not failed:
            failed.append("accept")
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    def failing_start(thread: threading.Thread) -> None:
        if thread.name == "jaxserve-welcome" and len(failed) == 1:
            failed.append("start")
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(socket.socket, "accept", failing_accept)
    monkeypatch.setattr(threading.Thread, "start", failing_start)
    found, (_, joined), _ = both()
    assert list(found) == [1] and joined == Joined("h:1") and failed == ["accept", "start"]


def test_a_process_that_was_lost_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "HELLO_S", 0.3)
    address = HOST, free_port(HOST)
    side = Side(lambda: gather(address, 3, FIRST, TOKEN, lambda why: None, seconds=4.0))

    def came_and_went(number: int) -> bool:
        """A process that waits for the others for HELLO_S alone."""
        one = replace(OTHER, process_id=number)
        given = Side(lambda: join(address, one, TOKEN, print, seconds=0.0)).ended()
        return "process 0 was lost: timed out" in str(given)

    until(lambda: came_and_went(1))
    others = [
        Side(lambda one=number: join(address, replace(OTHER, process_id=one), TOKEN, print))
        for number in (1, 2)
    ]
    for found in side.ended().values():
        found.send(Joined("h:1"))
    assert [given.ended()[1] for given in others] == [Joined("h:1")] * 2


def test_what_cannot_be_reached_or_is_taken_is_said() -> None:
    address = HOST, free_port(HOST)
    with pytest.raises(JaxServeError, match=r"coordinator=127.*: process 0 was not reached"):
        join(address, OTHER, TOKEN, lambda why: None, seconds=0.0)
    with socket.create_server(address), pytest.raises(JaxServeError, match="cannot listen there"):
        gather(address, 2, FIRST, TOKEN, lambda why: None, seconds=0.0)

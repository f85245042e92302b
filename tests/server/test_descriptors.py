"""Limits on open files: what is left of one for connections, and what a server says of it."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from server.descriptors import LEAST, Descriptors
from tests.server.server_process import ROOT, running_server
from tests.waiting import until

INFINITY = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The process's soft and hard limit, which nothing of the system knows."""
    kept = [0, 0]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(kept))
    monkeypatch.setattr(
        resource, "setrlimit", lambda kind, pair: kept.__setitem__(slice(2), list(pair))
    )
    yield kept


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 10**6, 4096 + 1024 + 512),
        (10**5, 10**6, 10**5),
        (64, 64, 64),
        (64, 256, 256),
        (LEAST, INFINITY, 4096 + 1024 + 512),
        (INFINITY, INFINITY, None),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(
    limits: list[int], soft: int, hard: int, then: int | None
) -> None:
    limits[:] = soft, hard
    assert Descriptors.raised(4096).limit == then
    assert limits == [soft if then is None else then, hard]


def test_too_low_a_limit_is_refused(limits: list[int]) -> None:
    limits[:] = LEAST - 1, LEAST - 1
    with pytest.raises(ValidationError, match=r"ulimit -n.*47.*48 or more"):
        Descriptors.raised(4096)


@pytest.mark.parametrize("limit", [LEAST, 64, 100, 256, 1024, 5632, 10**6])
def test_of_any_limit_something_is_kept_and_health_can_be_asked_for(limit: int) -> None:
    shares = Descriptors(limit)
    served = limit - next(n for n in range(limit, 0, -1) if not shares.excess(n - 1))
    kept = served - shares.extra - shares.listeners
    assert shares.listeners >= 1 and shares.extra >= 6 and 16 <= kept <= 64
    assert shares.leaving <= kept - 8, "connections on their way out leave the process some"


def test_room_is_what_the_process_has_not_opened_itself() -> None:
    shares = Descriptors(10**6)
    before = shares.room(0)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
    assert shares.room(0) == before - 10 and shares.room(10) == before
    for one in files:
        os.close(one)
    assert Descriptors().room(0) is None


def limited(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@pytest.mark.slow
def test_a_server_that_could_serve_nobody_says_so_in_a_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "server", "--model", str(bundled_model_path()), "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: limited(40),
    )
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "ulimit -n" in ended.stderr and "48 or more" in ended.stderr


@pytest.mark.slow
def test_a_server_with_few_descriptors_serves_and_answers_for_its_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four times as many connections as there is room for, and none of them is reset."""
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda *args, **more: real(*args, **more, preexec_fn=lambda: limited(64)),
    )
    with running_server() as server:
        monkeypatch.undo()
        assert any("--max-connections 4096 is lowered to" in line for line in server.lines)
        port = int(server.url.rpartition(":")[2])
        folder = f"/proc/{server.process.pid}/fd"
        before, left = len(os.listdir(folder)), list[int]()
        for _ in range(2):
            crowd = []
            for _ in range(100):
                crowd.append(socket.create_connection(("127.0.0.1", port), timeout=10))
                crowd[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
                crowd[-1].sendall(b"Content-Type: application/json\r\nContent-Length: 60\r\n\r\n")
                assert server.health() == 200 and len(os.listdir(folder)) < 60
            # one that was idle for a second makes room, others are told; the rest have room
            answered, _, _ = select.select(crowd, [], [], 10)
            told = [one.recv(30) for one in answered]
            assert all(not one or b" 503 " in one for one in told) and len(told) >= 40, told
            said = any("too many connections are open" in line for line in server.lines)
            assert said or not any(told)
            for one in crowd:
                one.close()
            most = left[0] if left else before + 4  # some are opened with the first requests, once
            until(lambda most=most: len(os.listdir(folder)) <= most, 20)
            left.append(len(os.listdir(folder)))
        assert left[0] <= before + 4 and left[1] <= left[0], left

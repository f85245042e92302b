"""A real server with two front processes on one port: each answers, and one is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.server_process import Server, httpx, running_server
from tests.waiting import until

KEYS = """
- {key: free, name: free}
- {key: few, name: few, requests_per_minute: 3}
"""
BODY = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "seed": 3, "temperature": 0.9}
CONTROL = ("--enable-control-routes", "--enable-server-load-tracking")


def children(server: Server, module: str) -> list[int]:
    tasks = Path(f"/proc/{server.process.pid}/task")
    found = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    words = {}
    for pid in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            words[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return sorted(pid for pid, one in words.items() if module.encode() in one)


def fronts(server: Server) -> list[int]:
    return children(server, "server.fronts.child")


def call(server: Server, method: str, path: str, key: str = "free", **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=60, **more)


def ask(server: Server, key: str = "free", **more: Any) -> httpx.Response:
    return call(server, "POST", "/v1/completions", key, json=BODY | more)


@contextmanager
def without(*pids: int) -> Iterator[None]:
    """Within, these processes accept no connection."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Stream:
    """A stream that is read in a thread.

    Args:
        server: answers.
        more: fields of the request.
    """

    def __init__(self, server: Server, **more: Any):
        self.text, self.error = "", ""
        self._body = BODY | {"stream": True} | more
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(server,))
        self.thread.start()
        assert self.begun.wait(30)

    def _read(self, server: Server) -> None:
        headers, body = {"Authorization": "Bearer free"}, self._body
        url = f"{server.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as lines:
                for line in lines.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            self.error = event["error"]["message"]
                            continue
                        self.text += event["choices"][0]["text"]
                        self.begun.set()
        except httpx.TransportError as error:
            self.error = type(error).__name__


def total(server: Server, name: str, **labels: str) -> float:
    found = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [one for family in found for one in family.samples]
    return sum(
        one.value
        for one in samples
        if one.name == f"jaxserve:{name}" and labels.items() <= one.labels.items()
    )


def wait_until(server: Server, is_so: Any) -> None:
    until(is_so, told=lambda: "".join(server.lines))


@pytest.mark.slow
def test_two_fronts_answer_as_one_server_and_one_may_die(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    fronts_of = ("--api-server-count", "2", "--api-keys-file", str(keys))
    flags = ("none", *fronts_of, "--compile-ahead", "1", *CONTROL)
    with running_server(*flags) as server:
        one, two = fronts(server)
        with without(two):
            expected = ask(server).json()["choices"]
            stored = call(
                server, "POST", "/v1/responses", json={"input": "a", "max_output_tokens": 4}
            ).json()
            assert ask(server, "few").status_code == 200
            assert ask(server, "few").status_code == 200
        with without(one):
            assert ask(server).json()["choices"] == expected, "whichever answers"
            assert call(server, "GET", f"/v1/responses/{stored['id']}").json() == stored
            assert ask(server, "few").status_code == 200
            assert ask(server, "few").status_code == 429, "three a minute, over both"
            assert ask(server, "none").status_code == 401
            stopped = ask(server, stop=[expected[0]["text"][20:24]]).json()["choices"][0]
            assert stopped["finish_reason"] == "stop" and len(stopped["text"]) <= 20
            assert ask(server, n=3, max_tokens=5).json()["usage"]["completion_tokens"] == 15
            assert ask(server, timeout=0.001, max_tokens=150).status_code == 504
        # five of one choice, one of three, one response; beside them one that timed out
        assert total(server, "request_success_total", finished_reason="length") == 9
        assert total(server, "request_success_total", finished_reason="stop") == 1
        assert total(server, "request_success_total", finished_reason="timeout") == 1
        for process in ("server", "front-0", "front-1", "engine"):
            assert total(server, "process_cpu_seconds_total", process=process) > 0

        with without(two):
            assert call(server, "POST", "/sleep?level=1").status_code == 200
        with without(one):
            wait_until(server, lambda: ask(server).status_code == 503)
            assert call(server, "GET", "/is_sleeping").json() == {"is_sleeping": True}
            assert call(server, "POST", "/wake_up").status_code == 200
            assert ask(server).status_code == 200, "at once"

        with without(two):
            lost = Stream(server)
        with without(one):
            kept = Stream(server)
            assert call(server, "GET", "/load").json() == {"server_load": 2}
        os.kill(one, signal.SIGKILL)
        lost.thread.join()
        assert lost.error, "its connections went with it"
        kept.thread.join()
        assert kept.text == expected[0]["text"], "the other one went on"
        wait_until(server, lambda: len(fronts(server)) == 2)
        server.wait_until_idle()
        (new,) = {*fronts(server)} - {two}
        with without(two):
            wait_until(server, lambda: call(server, "GET", "/load").json() == {"server_load": 0})
            assert ask(server).json()["choices"] == expected, "it has come back"
            dying = Stream(server)
            (engine,) = children(server, "jaxserve.isolation.child")
            os.kill(engine, signal.SIGKILL)
            dying.thread.join()
        assert (dying.text, dying.error) == (expected[0]["text"], ""), "another engine went on"
        wait_until(server, lambda: server.health() == 200)
        with without(new):
            last = Stream(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(server, lambda: server.health() == 503)
        last.thread.join()
        assert last.text == expected[0]["text"], "it may finish"
        assert server.process.wait(timeout=60) == 0
        assert not any("Traceback" in line for line in server.lines), "".join(server.lines)

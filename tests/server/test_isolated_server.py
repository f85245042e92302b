"""A real server with the engine in a process of its own: killed, drained, given up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from server.server_process import ENGINE_LOST
from tests.server.server_process import Server, httpx, running_server
from tests.waiting import until

BODY = {"prompt": "a", "max_tokens": 150, "ignore_eos": True, "seed": 3, "temperature": 0.9}


def engine_pid(server: Server) -> int:
    """The child of the server that runs the engine, beside the one that tries grammars."""
    tasks = Path(f"/proc/{server.process.pid}/task")
    found = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    name = b"jaxserve.isolation.child"
    (pid,) = (pid for pid in found if name in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(pid)


def ask(server: Server, **more: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY | more, timeout=60)


def wait_health(server: Server, status: int) -> None:
    until(lambda: server.health() == status)


@pytest.mark.slow
def test_a_killed_engine_is_replaced_and_three_deaths_end_the_server() -> None:
    with running_server() as server:
        expected = ask(server).json()["choices"]
        first = engine_pid(server)
        if Path(f"/proc/{first}/oom_score_adj").exists():
            score = int(Path(f"/proc/{first}/oom_score_adj").read_text())
            assert score > int(Path(f"/proc/{server.process.pid}/oom_score_adj").read_text())
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(ask(server).json()["choices"]))
        thread.start()
        until(server.running)
        os.kill(first, signal.SIGKILL)
        wait_health(server, 503)
        assert httpx.get(f"{server.url}/health").json() == {"status": "restarting"}
        refused = ask(server)
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        wait_health(server, 200)
        thread.join()
        assert found == [expected], "it went on"
        assert server.gauge("engine_restarts") == 1
        assert engine_pid(server) != first
        for _ in range(2):
            wait_health(server, 200)
            os.kill(engine_pid(server), signal.SIGKILL)
            time.sleep(0.3)
        assert server.process.wait(timeout=60) == ENGINE_LOST
        time.sleep(0.2)
        assert any("died 3 times" in line for line in server.lines if line.startswith("jaxserve:"))


@pytest.mark.slow
def test_sigterm_lets_requests_finish_and_refuses_new_ones() -> None:
    with running_server() as server:
        expected = ask(server).json()["choices"]
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(ask(server).json()["choices"]))
        thread.start()
        until(server.running)
        server.process.send_signal(signal.SIGTERM)
        wait_health(server, 503)
        late = ask(server)
        assert late.status_code == 503 and "shuts down" in late.json()["error"]["message"]
        thread.join()
        assert found == [expected]
        assert server.process.wait(timeout=60) == 0
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_an_error_and_never_a_short_answer() -> None:
    with running_server("none", "--shutdown-timeout", "0") as server:
        pid = engine_pid(server)
        found: list[int] = []
        more = {"n": 4, "max_tokens": 240}
        thread = threading.Thread(target=lambda: found.append(ask(server, **more).status_code))
        thread.start()
        until(server.running)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert found == [503]
        assert server.process.wait(timeout=60) == 0
        assert not Path(f"/proc/{pid}").exists(), "no engine is left behind"


@pytest.mark.slow
def test_it_sleeps_through_a_death_and_answers_as_before() -> None:
    with running_server("none", "--enable-control-routes") as server:
        expected = ask(server).json()["choices"]

        def sleeping() -> bool:
            told = httpx.get(f"{server.url}/is_sleeping").json()
            return bool(told["is_sleeping"])

        for level in (1, 2):
            assert httpx.post(f"{server.url}/sleep?level={level}", timeout=60).status_code == 200
            assert sleeping() and ask(server).status_code == 503 and server.health() == 200
            part = httpx.post(f"{server.url}/wake_up?tags=weights", timeout=60).json()
            assert part == {"status": "sleeping", "tags": ["weights"]} and sleeping()
            if level == 1:
                os.kill(engine_pid(server), signal.SIGKILL)
                wait_health(server, 503)
                assert httpx.post(f"{server.url}/wake_up").status_code == 503
                wait_health(server, 200)
                assert sleeping() and ask(server).status_code == 503, "as the one that died"
            assert httpx.post(f"{server.url}/wake_up", timeout=60).json()["status"] == "awake"
            assert not sleeping() and ask(server).json()["choices"] == expected


@pytest.mark.slow
def test_it_records_the_engine_while_that_goes_on(tmp_path: Path) -> None:
    flag = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path)})
    with running_server("none", "--profiler-config", flag) as server:

        def post(path: str, **body: object) -> httpx.Response:
            return httpx.post(f"{server.url}/{path}", json=body, timeout=60)

        assert post("stop_profile").status_code == 400
        assert post("start_profile", profile_prefix="one").status_code == 200
        refused = post("start_profile")
        assert refused.status_code == 400 and "one record at a time" in refused.text
        expected = ask(server).json()["choices"]
        file = Path(post("stop_profile").json()["trace"])
        assert file.is_relative_to(tmp_path / "one") and file.stat().st_size > 0
        assert ask(server).json()["choices"] == expected

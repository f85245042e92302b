"""A real server with two engines of the bundled model: one is killed under load."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.server_process import Server, httpx, running_server
from tests.waiting import until

REQUESTS = 16
TWO = ("none", "--data-parallel-size", "2", "--enable-control-routes")


def body_of(index: int) -> dict[str, Any]:
    prompt = f"{'abcdefgh'[index % 8]} is {index}"
    greedy = {"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index}
    return {"prompt": prompt, "max_tokens": 100 + index, "ignore_eos": True, **greedy}


def answer(server: Server, index: int) -> str:
    """A streamed answer, whole; an error event is text that no answer has."""
    text = ""
    body = body_of(index) | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
    return text


def answers(server: Server) -> list[str]:
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(lambda index: answer(server, index), range(REQUESTS)))


def by_engine(server: Server, name: str) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"jaxserve:{name}"
    }


def engine_pids(server: Server) -> list[int]:
    tasks = Path(f"/proc/{server.process.pid}/task")
    found = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    name = b"jaxserve.isolation.child"
    return sorted(
        int(pid) for pid in found if name in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    )


def wait_for_both(server: Server) -> None:
    """Until both engines serve: each has told of a pool."""
    pools = partial(by_engine, server, "cache_config_info")
    until(lambda: len(pools()) >= 2, 120, lambda: "".join(server.lines))


@pytest.mark.slow
def test_engines_are_killed_under_load_and_nobody_gets_a_wrong_answer() -> None:
    with running_server() as server:
        expected = answers(server)
    begun = time.monotonic()
    with running_server(*TWO) as server:
        wait_for_both(server)
        start_s = time.monotonic() - begun
        first = engine_pids(server)
        assert len(first) == 2
        if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
            cores = [os.sched_getaffinity(pid) for pid in first]
            assert not cores[0] & cores[1], "each has cores of its own"
        assert answers(server) == expected, "what one engine answers"
        assert min(by_engine(server, "prompt_tokens_total").values()) > 0, "both have served"
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(answers(server)))
        thread.start()
        until(lambda: min(by_engine(server, "num_requests_running").values()) >= 2)
        os.kill(first[1], signal.SIGKILL)
        health = set()
        while thread.is_alive():
            health.add(server.health())
            time.sleep(0.02)
        thread.join()
        assert found == [expected], "they went on"
        assert health == {200}, "the other engine has served throughout"
        deadline = time.monotonic() + 60
        while len(engine_pids(server)) < 2 or by_engine(server, "engine_restarts_total") not in (
            {"0": 0, "1": 1},
            {"0": 1, "1": 0},
        ):
            assert time.monotonic() < deadline, by_engine(server, "engine_restarts_total")
            time.sleep(0.1)
        assert len(set(engine_pids(server)) - set(first)) == 1
        before = by_engine(server, "prompt_tokens_total")
        assert answers(server) == expected
        after = by_engine(server, "prompt_tokens_total")
        assert all(after[one] > before[one] for one in ("0", "1")), "it is back"
        found.clear()
        thread = threading.Thread(target=lambda: found.append(answers(server)))
        thread.start()
        until(lambda: min(by_engine(server, "num_requests_running").values()) >= 2)
        killed = time.monotonic()
        for pid in engine_pids(server):
            os.kill(pid, signal.SIGKILL)
        while server.health() == 200:
            assert time.monotonic() < killed + 10, "nobody serves, and it is told"
        while server.health() == 503:
            assert time.monotonic() < killed + start_s + 5, (start_s, "".join(server.lines))
            time.sleep(0.05)
        thread.join()
        assert found == [expected], "those of both went on"
        server.wait_until_idle()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


@pytest.mark.slow
def test_both_engines_sleep_wake_and_forget_their_prefixes(tmp_path: Path) -> None:
    flag = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path)})
    with running_server(*TWO, "--profiler-config", flag) as server:
        wait_for_both(server)

        def post(path: str) -> httpx.Response:
            return httpx.post(f"{server.url}/{path}", timeout=60)

        expected = answers(server)
        assert post("sleep?level=1").status_code == 200
        assert (
            all(Path(f"/proc/{pid}").exists() for pid in engine_pids(server))
            and server.health() == 200
        )
        assert httpx.post(f"{server.url}/v1/completions", json=body_of(1)).status_code == 503
        assert post("wake_up").json()["status"] == "awake"
        assert answers(server) == expected
        assert post("reset_prefix_cache").status_code == 200
        assert post("start_profile").status_code == 200
        assert answers(server) == expected
        assert post("stop_profile").status_code == 200
        traces = partial(tmp_path.rglob, "perfetto_trace.json.gz")
        until(lambda: len({file.parts[-5] for file in traces()}) >= 2)
        with httpx.stream("GET", f"{server.url}/engine/stream", timeout=60) as stream:
            for line in stream.iter_lines():
                if '"num_slots"' in line:
                    frame = json.loads(line.removeprefix("data: "))
                    break
        assert frame["num_slots"] == 8, "of both engines"
        assert frame["counts"]["finished"] >= 3 * REQUESTS

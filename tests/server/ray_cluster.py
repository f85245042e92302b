"""A program: a local Ray cluster that serves the bundled model with two replicas, and its faults.

    python -m tests.server.ray_cluster PORT

Prints a JSON object of what was seen, as the last line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from checkpoints import bundled_model_path
from jaxserve.ray import build_openai_app

REPLICA, ENGINE = "ray::ServeReplica", "jaxserve.isolation.child"
SECONDS = 200


def processes(name: str) -> list[psutil.Process]:
    """Processes of this cluster by a part of their command line."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if name in " ".join(one.cmdline()):
                found.append(one)
        except psutil.NoSuchProcess:
            pass
    return sorted(found, key=lambda one: one.pid)


def ask(url: str, number: int, answers: dict[int, Any]) -> None:
    """One request: its text, or what it ended with."""
    body = {"model": "tiny", "prompt": f"{number % 8} + 3 =", "max_tokens": 60, "temperature": 0}
    body |= {"ignore_eos": True, "stream": number % 2 == 1}
    try:
        if not body["stream"]:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            good = answer.status_code == 200
            answers[number] = answer.json()["choices"][0]["text"] if good else answer.status_code
            return
        text, ended = "", False
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            if answer.status_code != 200:
                answers[number] = answer.status_code
                return
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    text += chunk["choices"][0]["text"] if "choices" in chunk else ""
                    if "error" in chunk:
                        answers[number] = "error event"
        answers.setdefault(number, text if ended else "cut")
    except httpx.HTTPError as error:
        answers[number] = type(error).__name__


def load(url: str, count: int, fault: Any = None) -> dict[int, Any]:
    """Requests at once, and a fault a second after they have begun."""
    answers: dict[int, Any] = {}
    threads = [threading.Thread(target=ask, args=(url, n, answers)) for n in range(count)]
    for thread in threads:
        thread.start()
    if fault is not None:
        time.sleep(1.0)
        fault()
    for thread in threads:
        thread.join()
    return answers


def wait_for(count: int, name: str) -> None:
    deadline = time.monotonic() + SECONDS
    while len(processes(name)) < count:
        assert time.monotonic() < deadline, f"{len(processes(name))} of {name}"
        time.sleep(0.5)


def main(port: int) -> None:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # nothing in the home
    os.environ |= quiet | {"JAX_PLATFORMS": "cpu"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    small = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}
    config = {
        "model_loading_config": {"model_id": "tiny", "model_source": str(bundled_model_path())},
        "engine_kwargs": small | {"compile_ahead": 2, "compile_in_background": False},
        "deployment_config": {"num_replicas": 2, "health_check_period_s": 1},
    }
    began = time.monotonic()
    serve.run(build_openai_app({"llm_configs": [config]}))
    seen: dict[str, Any] = {"ready_s": round(time.monotonic() - began, 1)}
    url = f"http://127.0.0.1:{port}"
    seen["models"] = [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
    seen["replicas"], seen["engines"] = len(processes(REPLICA)), len(processes(ENGINE))
    seen["plain"] = load(url, 16)
    seen["engine killed"] = load(url, 32, lambda: processes(ENGINE)[0].send_signal(signal.SIGKILL))
    wait_for(2, ENGINE)
    seen["worker killed"] = load(url, 32, lambda: processes(REPLICA)[0].send_signal(signal.SIGKILL))
    wait_for(2, ENGINE)
    seen["afterwards"] = load(url, 8)
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]))

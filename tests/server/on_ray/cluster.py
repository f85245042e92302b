"""A program: a local Ray cluster that serves the bundled model, its faults, load and updates.

    python -m tests.server.on_ray.cluster faults|scaling|bundles|batch PORT FOLDER

Prints a JSON object of what was seen, as the last line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import yaml
from ray import serve

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from jaxserve.ray import build_openai_app
from tests.server.server_process import ROOT

RAY_PAGE = ROOT / "docs" / "ray.md"
REPLICA, ENGINE = "ray::ServeReplica:default:jaxserve:tiny", "jaxserve.isolation.child"
FOLLOWER = "ray::Follower"
IN_TURN = {"request_router_class": "tests.server.on_ray.round_robin.RoundRobinRouter"}
ROUND_ROBIN = {"request_router_config": IN_TURN}
SECONDS = 200
MOST_TOKENS = 40


def config(**deployment: Any) -> dict[str, Any]:
    small = {"max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 64}
    fast = {"compile_ahead": 2, "compile_in_background": False}
    return {
        "model_loading_config": {"model_id": "tiny", "model_source": str(bundled_model_path())},
        "engine_kwargs": small | fast | {"enable_prompt_tokens_details": True},
        "deployment_config": {"health_check_period_s": 1} | deployment,
    }


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


def kill(found: list[psutil.Process]) -> None:
    for one in found:
        one.send_signal(signal.SIGKILL)


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def ask(url: str, number: int, answers: dict[int, Any]) -> None:
    """One request: its text, or what it ended with, such as a status and a body."""
    body = {"model": "tiny", "prompt": f"{number % 8} + 3 =", "max_tokens": MOST_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "stream": number % 2 == 1}
    try:
        if not body["stream"]:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            told = [answer.status_code, answer.text]
            good = answer.status_code == 200
            answers[number] = answer.json()["choices"][0]["text"] if good else told
            return
        text, ended = "", False
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            if answer.status_code != 200:
                answers[number] = [answer.status_code, answer.read().decode()]
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


def load(url: str, count: int, fault: Callable[[], Any] | None = None) -> dict[int, Any]:
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


def found_share(url: str, name: str) -> float:
    """The share of prompt tokens that caches had, of seven users who ask four times in turn."""
    asked = found = 0
    for turn in range(4):
        for user in range(7):
            text = (
                f"{name} {user}: "
                + f"value {user * 37 % 11} of the list, " * 12
                + "3 + 4 = " * turn
            )
            body = {"model": "tiny", "prompt": text, "max_tokens": 1}
            usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
            asked += usage["prompt_tokens"]
            found += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return found / asked


def refused() -> str:
    """What is said of more replicas than this cluster has room for."""
    try:
        full = {"llm_configs": [config(num_replicas=9)], "require_room": True}
        serve.run(build_openai_app(full))
    except ValidationError as error:
        return str(error)
    return "deployed"


def faults(port: int, folder: Path) -> dict[str, Any]:
    """No room; two replicas: routing, an engine killed, a worker killed, all workers killed."""
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    no_room = refused(), list(serve.status().applications)
    began, url = time.monotonic(), f"http://127.0.0.1:{port}"
    serve.run(build_openai_app({"llm_configs": [config(num_replicas=2)]}))
    seen: dict[str, Any] = {"ready_s": time.monotonic() - began, "no room": no_room}
    seen["models"] = [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
    seen["replicas"], seen["engines"] = len(processes(REPLICA)), len(processes(ENGINE))
    seen["plain"] = load(url, 16)
    seen["found by prefix"] = found_share(url, "a")
    seen["engine killed"] = load(url, 32, lambda: kill(processes(ENGINE)[:1]))
    wait_until(lambda: len(processes(ENGINE)) == 2, "an engine again")
    seen["worker killed"] = load(url, 32, lambda: kill(processes(REPLICA)[:1]))
    wait_until(lambda: len(processes(ENGINE)) == 2, "a worker again")
    seen["afterwards"] = load(url, 8)
    began = time.monotonic()
    kill([*processes(REPLICA), *processes(ENGINE)])
    seen["all killed"] = load(url, 8)
    seen["again_s"] = time.monotonic() - began
    serve.run(build_openai_app({"llm_configs": [config(num_replicas=2, **ROUND_ROBIN)]}))
    seen["found in turn"] = found_share(url, "b")
    return seen


def scaling(port: int, folder: Path) -> dict[str, Any]:
    """By `serve deploy`: one replica, two under load, one again; an update under load."""
    url, path = f"http://127.0.0.1:{port}", folder / "config.yaml"
    scale = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1000}
    scale |= {"target_queued_tokens": 60, "look_back_period_s": 2, "upscale_delay_s": 0}
    one = config(autoscaling_config=scale | {"downscale_delay_s": 6})

    def deploy() -> None:
        args = {"llm_configs": [one]}
        application = {"name": "default", "import_path": "jaxserve.ray:build_openai_app"}
        options = {"host": "127.0.0.1", "port": port}
        told = {"http_options": options, "applications": [application | {"args": args}]}
        path.write_text(yaml.safe_dump(told))
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(path)]
        subprocess.run(command, check=True, capture_output=True)

    def replicas() -> int:
        application = serve.status().applications.get("default")
        deployments = {} if application is None else application.deployments
        states = deployments["jaxserve:tiny"].replica_states if deployments else {}
        return dict(states).get("RUNNING", 0)

    deploy()
    wait_until(lambda: replicas() == 1, "one replica")
    seen: dict[str, Any] = {"at first": 1, "loaded": [], "updated": []}
    is_over = threading.Event()

    def until_over(seen: list[Any], number: int) -> None:
        while not is_over.is_set():
            answers: dict[int, Any] = {}
            ask(url, number, answers)
            seen.append(answers[number])

    def during(name: str, at_once: int, true: Callable[[], bool]) -> None:
        is_over.clear()
        clients = [
            threading.Thread(target=until_over, args=(seen[name], number))
            for number in range(at_once)
        ]
        for client in clients:
            client.start()
        try:
            wait_until(true, name)
        finally:
            is_over.set()
            for client in clients:
                client.join()

    during("loaded", 40, lambda: replicas() == 2)
    wait_until(lambda: replicas() == 1, "one replica again")
    before = {one.pid for one in processes(REPLICA)}
    one["engine_kwargs"] |= {"max_num_seqs": 4}
    deploy()
    during("updated", 4, lambda: replicas() == 1 and before.isdisjoint(_pids()))
    return seen


def _pids() -> set[int]:
    return {one.pid for one in processes(REPLICA)}


def bundles(port: int, folder: Path) -> dict[str, Any]:
    """A replica of two processes in two bundles: one of them is killed."""
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    one = config()
    of_two = {"num_processes": 2, "tensor_parallel_size": 2, "dtype": "float32"}
    small = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 1}, "compile_ahead": 1}
    one["engine_kwargs"] |= of_two | small | {"linear_backend": "xla"}
    began, url = time.monotonic(), f"http://127.0.0.1:{port}"
    serve.run(build_openai_app({"llm_configs": [one]}))
    seen: dict[str, Any] = {"ready_s": time.monotonic() - began}
    before = processes(FOLLOWER)
    seen["followers"], seen["engines"] = len(before), len(processes(ENGINE))
    seen["plain"] = load(url, 16)
    seen["killed"] = load(url, 16, lambda: kill(before))
    seen["afterwards"] = load(url, 8)
    seen["another"] = {one.pid for one in before}.isdisjoint(one.pid for one in processes(FOLLOWER))
    return seen


def batch(port: int, folder: Path) -> dict[str, Any]:
    """Lines of which some are bad and some were answered before, by two workers of Ray Data."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    lines, answers = [], []
    for number in range(1, 31):
        body = {"model": "tiny", "prompt": f"{number} + 3 =", "max_tokens": 4}
        body |= {"max_tokens": -1} if number in (10, 20) else {"temperature": 0}
        line = {"custom_id": f"r{number}", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line | {"method": "POST"}))
        answers.append(json.dumps({"id": f"batch_req_{number}", "custom_id": f"r{number}"}))
    source.write_text("\n".join(lines) + "\n")
    target.write_text("\n".join(answers[:6]))  # the sixth is cut off in its middle
    engines: set[int] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.3):
            engines.update(one.pid for one in processes(ENGINE))

    watching = threading.Thread(target=watch)
    watching.start()
    (program,) = re.findall(r"```python\n(.*?)```", RAY_PAGE.read_text(), flags=re.DOTALL)
    program = program.replace("LLMConfig(", "LLMConfig(engine_kwargs=small, ")
    program = program.replace("workers=2", "workers=2, batch_size=4")
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    os.chdir(folder)
    names: dict[str, Any] = {"small": config()["engine_kwargs"]}
    try:
        exec(program, names)
    finally:
        is_over.set()
        watching.join()
    told = names["done"]
    found = [json.loads(line) for line in target.read_text().splitlines()]
    return {
        "answered": told.num_answered,
        "before": told.num_before,
        "failures": [one["custom_id"] for one in told.failures],
        "workers": len(engines),
        "order": [one["custom_id"] for one in found],
    }


def main(name: str, port: int, folder: Path) -> None:
    # nothing is written into the home, and what the autoscaler is told is new
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    told = ("REPLICA_AUTOSCALING_METRIC_PUSH", "HANDLE_AUTOSCALING_METRIC_PUSH")
    os.environ |= quiet | {f"RAY_SERVE_{one}_INTERVAL_S": "0.5" for one in told}
    os.environ["JAX_PLATFORMS"] = "cpu"
    cluster = ray.init(num_cpus=4, include_dashboard=name == "scaling", log_to_driver=False)
    os.environ["RAY_DASHBOARD_ADDRESS"] = f"http://{cluster.dashboard_url}"  # of `serve deploy`
    phases = {"faults": faults, "scaling": scaling, "bundles": bundles, "batch": batch}
    try:
        seen = phases[name](port, folder)
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

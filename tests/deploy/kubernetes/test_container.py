"""The server starts, answers and drains as the rendered Deployment has its container run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.processes.network import free_port
from pallas_kernels.native import build, own_folder
from tests.deploy.kubernetes import container
from tests.deploy.kubernetes.rendering import needs_helm, of_kind, render
from tests.server.server_process import STARTUP_S

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")

SMALL = {"max-num-seqs": 4, "max-model-len": 2048, "max-num-batched-tokens": 64, "compile-ahead": 2}
MISSING = container.missing()


def answered(url: str) -> int:
    try:
        return int(httpx.get(url, timeout=5).status_code)
    except httpx.TransportError:
        return 0


def kernels(cache: Path) -> list[str]:
    """The libraries of native kernels that a cache has."""
    return [one.name for one in (cache / "jaxserve" / "native").glob("*.so")]


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    """The cache that a pod before these has left: no container spends its time on the compiler."""
    native = tmp_path / "claim" / "jaxserve" / "native"
    own_folder.make(native)
    shutil.copy2(build.build(), native)
    return tmp_path / "claim"


@needs_helm
@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_container_of_the_deployment_serves_and_drains(tmp_path: Path, claim: Path) -> None:
    port = free_port()
    values: dict[str, Any] = {
        "port": port,
        "config": SMALL | {"compile-in-background": False},
        "drain": {"preStopSeconds": 1, "shutdownTimeoutSeconds": 20},
        "env": [{"name": "JAX_PLATFORMS", "value": "cpu"}],
    }
    objects = render(values)
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    config_maps = {one["metadata"]["name"]: one["data"] for one in objects if "data" in one}
    (spec,) = pod["containers"]
    url = f"http://127.0.0.1:{port}"
    volumes = tmp_path / "volumes"
    volumes.mkdir()
    with container.running(pod, config_maps, volumes, claim) as one:
        probes = {name: spec[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness")}
        deadline = time.monotonic() + STARTUP_S
        while answered(url + probes["startup"]) != 200:
            assert time.monotonic() < deadline and one.process.poll() is None
            time.sleep(0.2)
        assert answered(url + probes["liveness"]) == 200

        status = one.status()
        assert status["Uid"].split() == ["10001"] * 4 == status["Gid"].split()
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1" and status["NSpid"].split()[-1] == "1"
        assert one.memory_limit() == container.num_bytes(spec["resources"]["limits"]["memory"])
        for path in ("/", "/usr", "/home/jaxserve", "/etc/jaxserve", str(Path(__file__).parent)):
            assert "Read-only" in one.run("touch", f"{path}/x").stderr, path
        assert list((volumes / "cache" / "jaxserve" / "xla").iterdir())
        assert kernels(volumes / "cache") == kernels(claim), "none was compiled"

        body = {"prompt": "2 + 3 =", "max_tokens": 4, "temperature": 0}
        said = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert said["choices"][0]["text"]

        ended: list[str] = []
        begun = threading.Event()

        def stream() -> None:
            long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=60) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    ended.append(line)

        running = threading.Thread(target=stream)
        running.start()
        assert begun.wait(30)
        hook = spec["lifecycle"]["preStop"]["exec"]["command"]
        asked = time.monotonic()
        assert one.run(*hook).returncode == 0
        assert running.is_alive()
        os.kill(one.pid, signal.SIGTERM)
        while (ready := answered(url + probes["startup"])) == 200:
            time.sleep(0.01)
        assert ready == 503 and running.is_alive()  # it drains, and what runs goes on
        assert one.process.wait(pod["terminationGracePeriodSeconds"]) == 0
        assert time.monotonic() - asked < pod["terminationGracePeriodSeconds"]
        running.join()
        chunks = [json.loads(line[6:]) for line in ended if line.startswith("data: {")]
        assert "data: [DONE]" in ended
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert not any("error" in chunk for chunk in chunks)


@needs_helm
@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_containers_of_a_group_serve_as_one_engine_and_drain_together(
    tmp_path: Path, claim: Path
) -> None:
    port = free_port()
    small = SMALL | {"tensor-parallel-size": 2, "dtype": "float32", "linear-backend": "xla"}
    small |= {"decode-backend": "xla", "prefill-backend": "xla"}
    small |= {"load-format": "dummy", "hf-overrides": {"num_hidden_layers": 1}}
    values: dict[str, Any] = {
        "workload": "LeaderWorkerSet",
        "leaderWorkerSet": {"size": 2, "port": free_port()},
        "secrets": {"processToken": {"name": "processes"}},
        "port": port,
        "config": small,
        "drain": {"preStopSeconds": 1, "shutdownTimeoutSeconds": 60},
        "env": [{"name": "JAX_PLATFORMS", "value": "cpu"}],
    }
    objects = render(values)
    config_maps = {one["metadata"]["name"]: one["data"] for one in objects if "data" in one}
    group = of_kind(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    url, secrets = f"http://127.0.0.1:{port}", {"processes": {"token": "sesame"}}
    address = {"LWS_LEADER_ADDRESS": "127.0.0.1", "POD_IP": "127.0.0.1"}
    with contextlib.ExitStack() as life:
        pods = []
        for number, role in enumerate(("leader", "worker")):
            folder = tmp_path / role
            folder.mkdir()
            told = address | {"LWS_WORKER_INDEX": str(number)}
            spec = group[f"{role}Template"]["spec"]
            one = container.running(
                spec, config_maps, folder, claim, secrets=secrets, variables=told
            )
            pods.append(life.enter_context(one))
        leader, worker = pods
        deadline = time.monotonic() + STARTUP_S
        while answered(f"{url}/health") != 200:
            assert time.monotonic() < deadline
            assert leader.process.poll() is worker.process.poll() is None
            time.sleep(0.2)
        for role in ("leader", "worker"):
            assert kernels(tmp_path / role / "cache") == kernels(claim), "none was compiled"
        body = {"prompt": "2 + 3 =", "max_tokens": 1000, "ignore_eos": True}
        answers: list[Any] = []

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=120).json())

        running = threading.Thread(target=ask)
        running.start()
        time.sleep(1)
        assert running.is_alive()
        # what a cluster does to each pod, where the hook of the worker takes longer than all this
        hooks = [
            group[f"{role}Template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]
            for role in ("leader", "worker")
        ]
        assert int(hooks[1]["command"][1]) == 71
        assert leader.run(*hooks[0]["command"]).returncode == 0
        os.kill(leader.pid, signal.SIGTERM)
        assert leader.process.wait(65) == worker.process.wait(25) == 0
        running.join()
        assert answers[0]["usage"]["completion_tokens"] == 1000

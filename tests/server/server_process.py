"""A real server process on the bundled model, and what tests ask of it."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpoints import bundled_model_path
from jaxserve.processes.network import free_port
from tests.waiting import until

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")

ROOT = Path(__file__).resolve().parents[2]
STARTUP_S = 240
CONTEXT = 256


@dataclass
class Server:
    """A running server process and what it has printed."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]
    saw_loading: bool
    verify: ssl.SSLContext | bool = True

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", verify=self.verify).status_code

    def running(self) -> float:
        """The gauge of requests that own a slot."""
        return self.gauge("num_requests_running")

    def gauge(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", verify=self.verify).text
        for family in text_string_to_metric_families(text):
            if family.name == f"jaxserve:{name}":
                return family.samples[0].value
        raise AssertionError(f"no gauge {name}")

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until no request runs or waits and no page is owned."""
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

        def busy() -> dict[str, float]:
            return {name: value for name in gauges if (value := self.gauge(name))}

        until(lambda: not busy(), seconds, busy)


def start(*flags: str, module: str = "server") -> tuple[subprocess.Popen[str], list[str]]:
    """Start a server as `python -m MODULE`; its output is collected line by line."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        lines.extend(iter(process.stdout.readline, ""))

    threading.Thread(target=read, daemon=True).start()
    return process, lines


@contextmanager
def running_server(max_queue_wait: str = "none", *more: str) -> Iterator[Server]:
    """A healthy server with four slots and a context of CONTEXT tokens; killed at the end.

    It has the bundled model, unless `more` names another one.
    """
    own = () if "--model" in more else ("--model", str(bundled_model_path()))
    with serving(
        *own,
        "--served-model-name",
        "tiny",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        str(CONTEXT),
        "--max-num-batched-tokens",
        "64",
        "--compile-ahead",
        "2",
        "--no-compile-in-background",
        "--enable-embeddings",
        "--max-queue-wait",
        max_queue_wait,
        *more,
    ) as server:
        yield server


@contextmanager
def serving(*flags: str, module: str = "server", certificate: str = "") -> Iterator[Server]:
    """A healthy server with these flags; killed at the end.

    Args:
        flags: of `jaxserve serve`.
        module: that is run.
        certificate: its file, where they make the server speak TLS.
    """
    port = free_port()
    process, lines = start(*flags, "--port", str(port), module=module)
    url = f"http://127.0.0.1:{port}"
    verify: ssl.SSLContext | bool = True
    if certificate:
        url, verify = f"https://localhost:{port}", ssl.create_default_context(cafile=certificate)
    found = Server(process, url, lines, False, verify)
    try:
        deadline = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                status = found.health()
            except httpx.TransportError:
                status = 0
            if status == 200:
                break
            found.saw_loading |= status == 503
            time.sleep(0.1)
        else:
            raise AssertionError("the server never became healthy:\n" + "".join(lines))
        yield found
    finally:
        process.kill()
        process.wait()

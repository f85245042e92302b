"""Clients that close their connections in the middle of their streams, all at once."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

READY_S = 120.0
IDLE_S = 60.0
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _get(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            _get(f"{url}/health")
            return
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.1)
    raise RuntimeError("the server does not become healthy")


def _busy(url: str) -> float:
    """Requests that run or wait, and pages that they own."""
    lines = _get(f"{url}/metrics").splitlines()
    values = [line for line in lines if line.startswith(tuple(f"jaxserve:{g}" for g in GAUGES))]
    assert len(values) == len(GAUGES), values
    return sum(float(line.rpartition(" ")[2]) for line in values)


async def _begin(port: int, index: int) -> asyncio.StreamWriter:
    """A stream of which the first bytes have come, or that waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": [5, index % 1000 + 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    await writer.drain()
    if index == 0:
        await reader.read(100)
    return writer


async def meet(clients: int) -> tuple[int, float, bool]:
    """Let clients vanish from a server.

    Returns what is still busy after a minute, seconds until nothing was, and whether a request
    afterwards got what it got before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * clients)), hard))
    port = _free_port()
    flags = ["--port", str(port), "--max-num-seqs", "8", "--max-model-len", "512"]
    flags += ["--max-num-batched-tokens", "128"]
    flags += ["--max-queue-wait", "none", "--disable-uvicorn-access-log"]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "server", *flags], stdout=subprocess.DEVNULL)
    try:
        await asyncio.to_thread(_wait_ready, url)
        body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "ignore_eos": True}
        before = json.loads(await asyncio.to_thread(_get, f"{url}/v1/completions", body))
        writers = await asyncio.gather(*[_begin(port, index) for index in range(clients)])
        await asyncio.sleep(0.5)
        begin = time.monotonic()
        for writer in writers:
            writer.transport.abort()
        busy = 1.0
        while busy and time.monotonic() < begin + IDLE_S:
            await asyncio.sleep(0.05)
            busy = await asyncio.to_thread(_busy, url)
        seconds = time.monotonic() - begin
        after = json.loads(await asyncio.to_thread(_get, f"{url}/v1/completions", body))
        return int(busy > 0), seconds, before["choices"] == after["choices"]
    finally:
        server.terminate()
        server.wait()

"""A server in a process of its own, and a client that costs less than it: for loads at the edge."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.isolated import importing_from
from jaxserve.bench.startup import healthy_server
from jaxserve.processes.network import free_port

ROOT = Path(__file__).parents[2]
STARTUP_S = 600.0
SERVER = (
    "-m",
    "server",
    "--max-num-seqs",
    "64",
    "--max-model-len",
    "512",
    "--max-num-batched-tokens",
    "512",
    "--disable-uvicorn-access-log",
)
# compiled programs are at hand: on a CPU what is compiled beside the load would be measured with it
ALL_COMPILED = ("--compile-ahead", "1000")


@dataclass
class Server:
    """A running server.

    Attributes:
        port: on 127.0.0.1.
        process: and its children.
        log: what it prints goes there.
    """

    port: int
    process: psutil.Process
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _all(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def rss(self) -> int:
        """Bytes of memory that it holds."""
        return sum(one.memory_info().rss for one in self._all())

    def processor_seconds(self) -> tuple[float, ...]:
        """Seconds of processor time so far, of the process and of each of its children."""
        return tuple(sum(one.cpu_times()[:2]) for one in self._all())

    def descriptors(self) -> int:
        return sum(one.num_fds() for one in self._all())

    def gauges(self) -> dict[str, float]:
        """Sums of the server's metrics by name."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("jaxserve:"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("jaxserve:")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self, seconds: float = 60.0) -> dict[str, float]:
        """Wait until nothing runs or waits; the gauges then.

        Raises:
            RuntimeError: something still does.
        """
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + seconds
        while any((found := self.gauges())[name] for name in names):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not idle: { {name: found[name] for name in names} }")
            time.sleep(0.1)
        return found


@contextmanager
def running_server(*flags: str, program: Sequence[str] = SERVER) -> Iterator[Server]:
    """A server on a free port, ready; ended afterwards.

    Args:
        flags: of the server.
        program: words of Python's command line before them, by default the bundled model's server.

    Raises:
        JaxServeError: it did not become ready; holds its last line.
    """
    port = free_port()
    command = [sys.executable, *program, "--port", str(port), *flags]
    environment = os.environ | importing_from(ROOT)
    with healthy_server("the server", command, port, environment, STARTUP_S) as started:
        yield Server(port, psutil.Process(started.process.pid), started.log)


@dataclass(slots=True)
class Reply:
    """One answer; status 0 when there was none."""

    status: int
    seconds: float
    headers: bytes = b""
    body: bytes = b""


def request(path: str, body: Any) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class _Connection(asyncio.Protocol):
    """One request after the other; answers must have a length."""

    def __init__(self) -> None:
        self._received = b""
        self._begin = 0.0
        self._end = -1  # of the answer, once its head is there
        self._answer: asyncio.Future[Reply] | None = None
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, data: bytes, begin: float) -> asyncio.Future[Reply]:
        self._received, self._end, self._begin = b"", -1, begin
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._end < 0:
            head = self._received.find(b"\r\n\r\n")
            if head < 0:
                return
            lowered = self._received[:head].lower() + b"\r\n"
            length = lowered.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._end = head + 4 + int(length)
        if len(self._received) >= self._end and self._answer and not self._answer.done():
            head, _, body = self._received.partition(b"\r\n\r\n")
            seconds = time.monotonic() - self._begin
            self._answer.set_result(Reply(int(head[9:12]), seconds, head.lower() + b"\r\n", body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result(Reply(0, time.monotonic() - self._begin))


@dataclass
class Client:
    """Posts over connections that are kept, as many as are needed at once.

    A client of asyncio's streams costs more than the server that it asks.
    """

    port: int
    _idle: list[_Connection] = field(default_factory=list)

    async def post(self, path: str, body: Any) -> Reply:
        """Send a request and read its answer."""
        return await self.send(request(path, body))

    async def send(self, data: bytes) -> Reply:
        """The same of the bytes of `request`."""
        begin = time.monotonic()
        while self._idle:
            kept = self._idle.pop()
            if kept.transport.is_closing():
                continue
            reply = await kept.ask(data, begin)
            if reply.status:  # else the server has closed it in this moment
                self._idle.append(kept)
                return reply
        try:
            loop = asyncio.get_running_loop()
            _, fresh = await loop.create_connection(_Connection, "127.0.0.1", self.port)
        except OSError:
            return Reply(0, time.monotonic() - begin)
        reply = await fresh.ask(data, begin)
        if reply.status:
            self._idle.append(fresh)
        return reply

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of the caller's own."""
        return await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)

    def close(self) -> None:
        for one in self._idle:
            one.transport.close()


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that at least this share of them do not exceed; nan of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

#!/usr/bin/env python3
"""The processor time that a request takes of each process of a server, by number of fronts.

The engine is a stub, so that a request costs nothing but HTTP, JSON, text and messages. Requests
are streamed completions; their client is a process of its own, which is not counted.

    python -m benchmarks.fronts --fronts 1 2 --requests 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.extras import require

SERVER = ["--max-num-seqs", "64", "--max-model-len", "2048", "--disable-uvicorn-access-log"]
STUB, FRONT = "benchmarks.stub_engine", "server.fronts.child"
PROMPT = "Once upon a time there was a little child who lived in a house by the sea. " * 8


def serve(flags: list[str], engine: str = STUB) -> int:
    """`jaxserve serve` with another module in the place of the engine's process."""
    from server.cli import build_parser
    from server.commands.serve import asked_for
    from server.server_process import serve as serve_until_signal

    args = build_parser("serve").parse_args(["serve", *flags])
    config, told, isolation = asked_for(args)
    return serve_until_signal(config, args, told, replace(isolation, module=engine), None)


class _Reader(asyncio.Protocol):
    """Sends one request after the other and reads the streams that answer them."""

    def __init__(self, data: bytes, count: int):
        self._data, self._left = data, count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self._end = (self._end + data)[-5:]
        if self._end != b"0\r\n\r\n":
            return
        self._left -= 1
        if self._left:
            self._end = b""
            self._transport.write(self._data)
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server has hung up"))


async def _load(port: int, requests: int, at_once: int, tokens: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    whole = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    each = [requests // at_once + (one < requests % at_once) for one in range(at_once)]
    made = [
        await loop.create_connection(lambda count=count: _Reader(whole, count), "127.0.0.1", port)
        for count in each
        if count
    ]
    await asyncio.gather(*(reader.done for _, reader in made))


def processor_seconds(server: Any) -> dict[str, float]:
    """Of each process so far, by what it is."""
    found = {"server": sum(server.process.cpu_times()[:2])}
    fronts = 0
    for child in server.process.children():
        words, seconds = child.cmdline(), sum(child.cpu_times()[:2])
        if STUB in words:
            found["engine"] = seconds
        elif FRONT in words:  # another one tries grammars
            found[f"front {fronts}"] = seconds
            fronts += 1
    return found


def measure(fronts: int, requests: int, at_once: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of processor time a request, by process, and requests a second."""
    from benchmarks.verify.edge_load import running_server
    from checkpoints import bundled_model_path

    program = ["-m", "benchmarks.fronts", "--serve", "--", str(bundled_model_path()), *SERVER]
    with running_server("--api-server-count", str(fronts), program=program) as server:
        asyncio.run(_load(server.port, max(at_once, requests // 10), at_once, tokens))
        before, begin = processor_seconds(server), time.perf_counter()
        # in another process: this one's would have the processor's time of the server's on one core
        words = [str(server.port), str(requests), str(at_once), str(tokens)]
        load = [sys.executable, "-m", "benchmarks.fronts", "--load", *words]
        subprocess.run(load, check=True)
        seconds, after = time.perf_counter() - begin, processor_seconds(server)
    each = {name: 1000 * (after[name] - before[name]) / requests for name in after}
    return {"fronts": fronts, "per_second": requests / seconds, "ms_each": each}


def main(words: list[str]) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each number")
    parser.add_argument("--load", type=int, nargs=4, help=argparse.SUPPRESS)
    if words[:2] == ["--serve", "--"]:
        return serve(words[2:])
    args = parser.parse_args(words)
    if args.load:
        asyncio.run(_load(*args.load))
        return 0
    require(parser, "test", "psutil")
    from jaxserve.bench.measure import describe, environment

    if not args.json:
        print(
            f"{describe(environment())}\n{args.requests} streams of {args.tokens} tokens, "
            f"{args.at_once} at once"
        )
    for fronts in args.fronts:
        found = measure(fronts, args.requests, args.at_once, args.tokens)
        if args.json:
            print(json.dumps(found))
            continue
        each = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(found["ms_each"].items()))
        print(f"{fronts} front(s): {found['per_second']:.0f} requests/s; ms a request: {each}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

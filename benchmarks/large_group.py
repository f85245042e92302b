#!/usr/bin/env python3
"""The effect of a request of thousands of completions on another client's stream.

A server is started. A client streams a completion: alone, beside as many single requests as there
are slots, one after the other, and beside one request with `n` completions; its client goes away
in the end. The steps have as many rows in the last two: the rows make the second slower than the
first, the group makes the third slower than the second.

    python -m benchmarks.large_group --n 1024 16384
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.extras import require
from checkpoints import bundled_model_path
from jaxserve.bench.measure import describe, environment
from jaxserve.bench.percentiles import percentile
from jaxserve.bench.startup import healthy_server
from jaxserve.errors import JaxServeError
from jaxserve.processes.network import free_port

if TYPE_CHECKING:
    import httpx

    Load = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]

OTHERS = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 1.0}


@contextmanager
def server(slots: int, words: list[str]) -> Iterator[str]:
    """A server on the bundled model with all programs compiled; its address."""
    port = free_port()
    command = [sys.executable, "-m", "server", str(bundled_model_path()), "--port", str(port)]
    command += ["--max-num-seqs", str(slots), "--max-queue-wait", "none"]
    command += ["--max-num-queued-reqs", "none", *words]
    with healthy_server("the server", command, port, {**os.environ}):
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def running(load: Load | None, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """A load that goes on within the block; its client goes away at the end."""
    if load is None:
        yield
        return
    task = asyncio.create_task(load(client))
    try:
        yield
        if task.done():
            await task  # it failed, or was too small
            raise JaxServeError("the load was over before the stream")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def stream(address: str, tokens: int, load: Load | None) -> list[float]:
    """Milliseconds between a stream's pieces; the load begins late and ends early by a tenth."""
    import httpx  # where it is used: an extra's

    body = OTHERS | {"max_tokens": tokens, "stream": True, "temperature": 0.0}
    times: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=address, timeout=600) as own,
        httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as others,
        contextlib.AsyncExitStack() as stack,
        own.stream("POST", "/v1/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            times.append(time.perf_counter())
            if len(times) == tokens // 10:
                await stack.enter_async_context(running(load, others))
            elif len(times) == tokens - tokens // 10:
                await stack.aclose()
    return [1e3 * (b - a) for a, b in zip(times[tokens // 10 :], times[tokens // 10 + 1 :])]


def singles(slots: int) -> Load:
    """As many requests as there are slots at any time."""

    async def load(client: httpx.AsyncClient) -> None:
        async def one() -> None:
            while True:
                answer = await client.post("/v1/completions", json=OTHERS | {"max_tokens": 64})
                answer.raise_for_status()

        await asyncio.gather(*(one() for _ in range(slots)))

    return load


def group(n: int) -> Load:
    async def load(client: httpx.AsyncClient) -> None:
        body = OTHERS | {"max_tokens": 64, "n": n}
        (await client.post("/v1/completions", json=body)).raise_for_status()

    return load


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[16384])
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1500, help="of the stream")
    parser.add_argument("--rounds", type=int, default=2, help="each load's turns")
    parser.add_argument("--quick", action="store_true", help="few slots, one short round")
    parser.add_argument("serve_args", nargs="*", metavar="-- SERVE_ARGS", help="of jaxserve serve")
    options = parser.parse_args(arguments)
    require(parser, "server,bench", "httpx", "uvicorn")
    words = options.serve_args
    if options.quick:
        options.slots, options.tokens, options.rounds = 4, 200, 1
        words = [*words, "--compile-ahead", "2", "--no-compile-in-background"]
    else:
        words = [*words, "--compile-ahead", "1000", "--no-compile-in-background"]
    loads: dict[str, Load | None] = {"nobody": None, "single requests": singles(options.slots)}
    loads |= {f"one of n = {n:,}": group(n) for n in options.n}
    gaps: dict[str, list[float]] = {name: [] for name in loads}
    with server(options.slots, words) as address:
        asyncio.run(stream(address, 50, None))
        for _ in range(options.rounds):
            for name, load in loads.items():
                gaps[name] += asyncio.run(stream(address, options.tokens, load))
    print("| beside | tokens | median, ms | p99, ms | largest, ms |\n|---|---:|---:|---:|---:|")
    for name, found in gaps.items():
        print(
            f"| {name} | {len(found)} | {statistics.median(found):.2f} | "
            f"{percentile(found, 99):.2f} | {max(found):.2f} |"
        )
    print(f"\n{options.slots} slots; {describe(environment())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

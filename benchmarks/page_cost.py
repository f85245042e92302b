#!/usr/bin/env python3
"""The cost of watching a loaded server: processor time with the page's stream and without.

The same work is done in pairs, with and without a watcher, first by turns. The processor time of
the server's processes is counted, the engine's among them; the watcher reads the stream as
the page does. Pairs are short and many, so that what else changes on a machine changes little
within one, and a request brings all its prompts at once, so that each time the same steps are
computed. The interval is that of the mean of the pairs' log ratios.

    python -m benchmarks.page_cost [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.verify.edge_load import Client, Server, running_server
from jaxserve.bench.measure import describe, environment

MOST = 1.01
PROMPT = 40  # tokens
LEAST_PAIRS = 16  # from which on the mean of their log ratios is normal enough
QUICK = {"pairs": 16, "rounds": 1, "idle": 3.0}


@dataclass(frozen=True)
class Work:
    """The work of one half of a pair.

    Attributes:
        rounds: requests, one after the other.
        prompts: prompts of each request.
        tokens: tokens of each output.
    """

    rounds: int
    prompts: int
    tokens: int


async def _work(server: Server, work: Work, seed: int) -> None:
    rng, client = random.Random(seed), Client(server.port)
    for _ in range(work.rounds):
        # no two prompts are alike
        prompts = [[rng.randrange(5, 2000) for _ in range(PROMPT)] for _ in range(work.prompts)]
        body = {"prompt": prompts, "max_tokens": work.tokens, "ignore_eos": True}
        reply = await client.post("/v1/completions", body)
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.body[:200]!r}")
    client.close()


def processor_seconds(server: Server) -> float:
    """Of the server's processes so far, to the nanosecond: what psutil reads counts hundredths."""
    processes = [server.process, *server.process.children(recursive=True)]
    # the clock of a process' running time, as clock_getcpuclockid(3) makes it of its id
    return sum(time.clock_gettime(~one.pid << 3 | 2) for one in processes)


class Watcher:
    """Reads the engine's stream, as the page does while it is looked at.

    Attributes:
        frames, num_bytes: that came.
    """

    def __init__(self) -> None:
        self.frames = self.num_bytes = 0

    async def run(self, server: Server) -> None:
        """Until it is cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**20)
        try:
            writer.write(b"GET /engine/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            async for line in reader:
                self.num_bytes += len(line)
                if line.startswith(b"data: "):
                    self.frames += "frame" in json.loads(line[6:])
        finally:
            writer.close()


@asynccontextmanager
async def watched(server: Server, watcher: Watcher | None) -> AsyncIterator[None]:
    """Within the block a watcher reads the stream; it has seen the whole map."""
    if watcher is None:
        yield
        return
    before = watcher.frames
    task = asyncio.ensure_future(watcher.run(server))
    while watcher.frames == before:
        if task.done():
            raise RuntimeError("the stream has ended") from task.exception()
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure(server: Server, work: Work, seed: int, watcher: Watcher | None) -> float:
    """Processor seconds of the server for the work."""
    async with watched(server, watcher):
        begin = processor_seconds(server)
        await _work(server, work, seed)
        return processor_seconds(server) - begin


async def _idle(server: Server, seconds: float) -> float:
    """Processor seconds a second that a watcher costs a server that has nothing else to do."""
    taken = {}
    for watcher in (None, Watcher()):
        async with watched(server, watcher):
            begin = processor_seconds(server)
            await asyncio.sleep(seconds)
            taken[watcher is not None] = processor_seconds(server) - begin
    return (taken[True] - taken[False]) / seconds


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of ratios, and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


async def _run(pairs: int, work: Work, idle_seconds: float) -> int:
    print(f"{describe(environment())}; {work}")
    ratios: list[float] = []
    flags = ("--max-queue-wait", "none", "--no-compile-in-background")
    with running_server(*flags) as server:
        for seed in (-1, -2):
            await measure(server, work, seed, None)
        watcher, begin = Watcher(), time.monotonic()
        for pair in range(pairs):
            order = (None, watcher) if pair % 2 else (watcher, None)
            taken = {}
            for half, one in enumerate(order):
                # prompts of their own, of which the prefix cache has nothing
                seconds = await measure(server, work, 2 * pair + half, one)
                taken[one is not None] = seconds
            ratios.append(taken[True] / taken[False])
            print(f"pair {pair}: {taken[True]:.2f} s with, {taken[False]:.2f} s without")
        seconds = time.monotonic() - begin
        idle = await _idle(server, idle_seconds)
    mean, low, high = interval(ratios)
    print(f"{watcher.frames} frames, {watcher.num_bytes / max(1, watcher.frames):.0f} bytes each")
    print(f"with / without: {mean:.4f} ({low:.4f} to {high:.4f}), {pairs} pairs, {seconds:.0f} s")
    print(f"a watched server without work: {1000 * idle:.1f} ms of a core more, a second")
    print(f"at most {MOST}: {'yes' if mean <= MOST else 'NO'}")
    return 0 if watcher.frames and mean <= MOST else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0 if the mean is no more than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=48, metavar="N")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each half of a pair")
    parser.add_argument("--prompts", type=int, default=48, help="of a request")
    parser.add_argument("--tokens", type=int, default=64, help="of an output")
    parser.add_argument("--idle", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter pairs")
    args = parser.parse_args(arguments)
    if args.quick:
        vars(args).update(QUICK)
    if args.pairs < LEAST_PAIRS:
        parser.error(f"--pairs {args.pairs}: {LEAST_PAIRS} or more")
    return asyncio.run(_run(args.pairs, Work(args.rounds, args.prompts, args.tokens), args.idle))


if __name__ == "__main__":
    sys.exit(main())

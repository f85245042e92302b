#!/usr/bin/env python3
"""More requests than the machine can serve: what is let in is served in time, the rest refused.

Requests come at a rate that rises to `--rate` and stays there, whether or not answers come back.
Each must be a complete and right 200, or a 503 that says when to come again. The same load is then
given to a server that refuses none. `--connections` and `--queued` measure memory instead.

    python -m benchmarks.ramp --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

from benchmarks.open_loop import Exchange, OpenLoop
from benchmarks.verify.edge_load import (
    ALL_COMPILED,
    Client,
    Reply,
    Server,
    percentile,
    request,
    running_server,
)
from jaxserve.bench.measure import describe, environment

PROMPTS = [[5 + (index * 7 + place) % 300 for place in range(16)] for index in range(16)]
MAX_TOKENS = 16
MOST_S = 15.0  # for answers that are still to come when all requests are sent
CONNECTIONS_BOUND, QUEUE_BOUND = 256 * 2**20, 1024 * 2**20  # bytes that a server may take for them
QUEUE_S = 200.0  # until all that are to wait do
AT_A_TIME = 1000  # prompts of a call
IN_TIME_S = 2.0  # an answer counts as good when it came within
# what is compiled meanwhile would be taken for memory of connections and requests
FEW_COMPILED = ("--compile-ahead", "2", "--no-compile-in-background")
MOST_WAIT_S = 1.0
REFUSING = f"refuses what waits {MOST_WAIT_S:g} s"
REFUSES = ("--max-queue-wait", f"{MOST_WAIT_S:g}")
OPEN_DOOR = (
    *("--max-queue-wait", "none"),
    *("--max-num-queued-reqs", "none"),
    *("--max-num-queued-tokens", "none"),
    *("--max-connections", "20000"),
)


@dataclass
class Outcome:
    """The results of the requests of one run.

    Attributes:
        exchanges: one a request.
        wrong: of them, what is neither a right 200 nor a 503 with Retry-After.
        seconds: in which the requests came, and the last of them could be answered in time.
        peak: bytes of memory that the server held at most; before: before the first request.
    """

    exchanges: list[Exchange]
    wrong: list[str]
    seconds: float
    before: int
    peak: int

    def since_due(self, status: int) -> list[float]:
        """Seconds of the requests that were answered so, from when each was due."""
        return [one.since_due for one in self.exchanges if one.status == status]

    def since_begun(self, status: int) -> list[float]:
        """The same from when its connection was taken or opened."""
        return [one.since_begun for one in self.exchanges if one.status == status]

    def row(self, name: str) -> str:
        served, shed = self.since_due(200), self.since_due(503)
        return (
            f"| {name} | {len(self.exchanges)} | {len(served)} | "
            f"{100 * len(shed) / len(self.exchanges):.1f} % | {len(self.wrong)} | "
            f"{percentile(served, 0.5):.3f} | {percentile(served, 0.99):.3f} | "
            f"{percentile(self.since_begun(200), 0.99):.3f} | "
            f"{1e3 * percentile(shed, 0.5):.1f} | {self.goodput():.1f} | "
            f"{self.peak / 2**20:.0f} (+{(self.peak - self.before) / 2**20:.0f}) |"
        )

    def goodput(self) -> float:
        return sum(one <= IN_TIME_S for one in self.since_due(200)) / self.seconds


HEAD = (
    "| server | requests | served | shed | wrong | p50, s | p99, s | p99 from the connection, s | "
    f"p50 of a refusal, ms | served within {IN_TIME_S:g} s, a second | peak memory, MiB |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def arrivals(rate: float, ramp: float, hold: float) -> list[float]:
    """Seconds at which requests are sent: a rate that rises evenly from 0, then stays."""
    rising = int(rate * ramp / 2)
    times = [(2 * index * ramp / rate) ** 0.5 for index in range(rising)]
    return times + [ramp + index / rate for index in range(int(rate * hold))]


def body(index: int) -> dict[str, object]:
    prompt = PROMPTS[index % len(PROMPTS)]
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


def load(server: Server, times: list[float]) -> Outcome:
    """Send requests at these times, whatever has come back."""
    expected = asyncio.run(_references(server))
    before = peak = server.rss()
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(1.0):
            peak = max(peak, server.rss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    data = [request("/v1/completions", body(index)) for index in range(len(PROMPTS))]
    used, own, begin = server.processor_seconds(), time.process_time(), time.monotonic()
    try:
        report = OpenLoop(server.port, data).run(times, MOST_S)
    finally:
        stop.set()
        watcher.join()
    late, own = time.monotonic() - begin, time.process_time() - own
    spent = [then - now for now, then in zip(used, server.processor_seconds())]
    lateness = [one.begun - one.due for one in report.exchanges]
    print(
        f"{late:.1f} s; processor seconds: server {spent[0]:.1f}, engine {sum(spent[1:]):.1f}, "
        f"generator {own:.1f}; {report.opened} connections; requests were sent late by "
        f"{percentile(lateness, 0.99):.3f} s (p99), its longest pause was {report.pause:.3f} s"
    )
    wrong = [
        text
        for one in report.exchanges
        if (text := mistake(one, expected[one.index % len(PROMPTS)])) is not None
    ]
    return Outcome(report.exchanges, wrong, times[-1] + IN_TIME_S, before, peak)


async def _references(server: Server) -> list[str]:
    """The right answer to each prompt."""
    client = Client(server.port)
    replies = [await client.post("/v1/completions", body(i)) for i in range(len(PROMPTS))]
    client.close()
    return [json.loads(one.body)["choices"][0]["text"] for one in replies]


def mistake(answer: Exchange, expected: str) -> str | None:
    """The fault of an answer, in words; None: it is right."""
    if answer.status == 503:
        after = answer.head.partition(b"retry-after: ")[2].partition(b"\r\n")[0]
        return None if after.isdigit() and int(after) >= 1 else "a 503 without Retry-After"
    if answer.status != 200:
        return answer.error or f"status {answer.status}"
    told = json.loads(answer.body)
    if told["usage"]["completion_tokens"] != MAX_TOKENS:
        return f"{told['usage']['completion_tokens']} tokens"
    return None if told["choices"][0]["text"] == expected else "another text"


def ramp(rate: float, seconds_of_ramp: float, hold: float, *, compare: bool) -> int:
    times = arrivals(rate, seconds_of_ramp, hold)
    print(
        f"{describe(environment())}\n\n"
        f"{len(times)} requests: {seconds_of_ramp:g} s up to {rate:g} a second, "
        f"then {hold:g} s; {len(PROMPTS[0])} tokens each, and {MAX_TOKENS} generated\n\n{HEAD}"
    )
    outcomes = {}
    servers: list[tuple[str, tuple[str, ...]]] = [(REFUSING, REFUSES)]
    if compare:
        servers.append(("lets everybody in", OPEN_DOOR))
    for name, flags in servers:
        with running_server(*ALL_COMPILED, *flags) as server:
            outcomes[name] = load(server, times)
            server.wait_until_idle()
        print(outcomes[name].row(name), flush=True)
    shed = outcomes[REFUSING]
    p99 = percentile(shed.since_due(200), 0.99)
    verdicts = {
        "every answer is a right 200 or a 503 with Retry-After": not shed.wrong,
        f"p99 of those that were let in is {IN_TIME_S:g} s or less": p99 <= IN_TIME_S,
    }
    if compare:
        least = outcomes["lets everybody in"].goodput()
        verdicts["goodput is not below that of the open door"] = shed.goodput() >= least
    print(f"\n{told_refusals(shed)}\n")
    for text, holds in verdicts.items():
        print(f"- {text}: {'yes' if holds else 'NO'}")
    for text in sorted(set(shed.wrong))[:5]:
        print(f"  {text}: {shed.wrong.count(text)}")
    return 0 if all(verdicts.values()) else 1


def told_refusals(outcome: Outcome) -> str:
    """Refusals counted by message, without the messages' numbers, and the slowest requests."""
    texts = Counter[str]()
    for one in outcome.exchanges:
        if one.status == 503:
            message = json.loads(one.body)["error"]["message"]
            texts[re.sub(r"[0-9.]+", "N", message)] += 1
    slowest = sorted(outcome.exchanges, key=lambda one: -one.since_due)[:5]
    lines = [f"- {count} times: {text}" for text, count in texts.most_common()]
    lines += [
        f"- slow: status {one.status}, due at {one.due - outcome.exchanges[0].due:.2f} s, begun "
        f"{one.begun - one.due:.3f} s later, sent {one.sent - one.begun:.3f} s after that, "
        f"answered {one.ended - one.sent:.3f} s after that"
        for one in slowest
    ]
    return "\n".join(lines)


def memory_of_connections(count: int) -> int:
    """Open so many connections, each with a request's first bytes; what the server holds then.

    Returns 1 where that is more than CONNECTIONS_BOUND, or a request beside them is not served.
    """
    _raise_descriptors(count + 200)

    async def open_all(server: Server) -> bool:
        client = Client(server.port)
        await client.post("/v1/completions", body(0))
        before = server.rss()
        pairs = []
        for _ in range(count):
            pair = await client.connect()
            pair[1].write(b"POST /v1/completions HTTP/1.1\r\n")
            pairs.append(pair)
        await asyncio.sleep(2)
        after, is_healthy = server.rss(), (await client.post("/v1/completions", body(0))).status
        each = (after - before) / count / 1024
        print(
            f"{count} open connections: +{(after - before) / 2**20:.0f} MiB, {each:.1f} KiB each; "
            f"{server.descriptors()} descriptors; a request beside them: {is_healthy}"
        )
        for _, writer in pairs:
            writer.close()
        return _is_within(after - before, CONNECTIONS_BOUND) and is_healthy == 200

    with running_server(*FEW_COMPILED, "--max-connections", str(count + 100)) as server:
        return 0 if asyncio.run(open_all(server)) else 1


def memory_of_queue(count: int) -> int:
    """Have so many requests wait; what the server holds then.

    Returns 1 where that is more than QUEUE_BOUND, or fewer could wait.
    """

    async def queue_all(server: Server) -> bool:
        client = Client(server.port)
        await client.post("/v1/completions", body(0))
        gauges = server.gauges()
        before, base = server.rss(), arrived(gauges)
        many = {"prompt": [PROMPTS[0]] * AT_A_TIME, "max_tokens": 400, "ignore_eos": True}
        tasks: list[asyncio.Task[Reply]] = []
        waiting, deadline = 0.0, time.monotonic() + QUEUE_S
        # one after the other: a thousand prompts that begin at a time hold the loop for a moment
        while waiting < count and time.monotonic() < deadline:
            if arrived(gauges) - base >= AT_A_TIME * len(tasks):
                tasks.append(asyncio.ensure_future(client.post("/v1/completions", many)))
            await asyncio.sleep(0.05)
            gauges = await asyncio.to_thread(server.gauges)
            waiting = gauges["num_requests_waiting"]
        after = server.rss()
        print(
            f"{waiting:.0f} waiting requests: +{(after - before) / 2**20:.0f} MiB, "
            f"{(after - before) / max(1.0, waiting) / 1024:.1f} KiB each"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return _is_within(after - before, QUEUE_BOUND) and waiting >= count

    with running_server(*FEW_COMPILED, *OPEN_DOOR) as server:
        return 0 if asyncio.run(queue_all(server)) else 1


def arrived(gauges: dict[str, float]) -> float:
    """Requests that the engine knows, with those that it has finished.

    Some run and some have ended by the time when the last of a call waits.
    """
    names = ("num_requests_waiting", "num_requests_running", "request_success_total")
    return sum(gauges.get(name, 0.0) for name in names)


def _is_within(held: int, bound: int) -> bool:
    holds = held <= bound
    print(f"- at most {bound / 2**20:.0f} MiB: {'yes' if holds else 'NO'}")
    return holds


def _raise_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second at the end")
    parser.add_argument("--ramp", type=float, default=10.0, help="seconds until then")
    parser.add_argument("--hold", type=float, default=5.0, help="seconds at that rate")
    parser.add_argument("--connections", type=int, help="instead: memory of open connections")
    parser.add_argument("--queued", type=int, help="instead: memory of waiting requests, thousands")
    parser.add_argument("--no-comparison", action="store_true", help="only the server that refuses")
    parser.add_argument("--quick", action="store_true", help="2 s up to the rate, and 3 s at it")
    args = parser.parse_args()
    _raise_descriptors(20_000)
    if args.connections:
        return memory_of_connections(args.connections)
    if args.queued:
        return memory_of_queue(args.queued)
    if args.quick:
        args.ramp, args.hold = 2.0, 3.0
    return ramp(args.rate, args.ramp, args.hold, compare=not args.no_comparison)


if __name__ == "__main__":
    sys.exit(main())

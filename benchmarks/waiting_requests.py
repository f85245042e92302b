#!/usr/bin/env python3
"""The cost of waiting requests: memory of each, and the time of a plan with few and many of them.

Engine and client are the real ones, the device is one in pure Python. Memory is what Python's
allocator counts, without the prompts' tokens and the parameters that the caller made. The plans are
of a scheduler with all slots taken, some by a new request in each step; each that ends is replaced
by one more that waits.

    python -m benchmarks.waiting_requests --requests 1000 100000 --clients 1 1000
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
import tracemalloc
from functools import partial

from benchmarks.extras import require
from jaxserve import SamplingParams
from jaxserve.bench.measure import describe, environment
from jaxserve.boundary.messages import AddGroup
from jaxserve.config.engine_config import SCHEDULING_POLICIES, EngineConfig
from jaxserve.memory.manager import PageManager
from jaxserve.request.queueing import Queueing
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import StopRule
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.policies import make_policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits

SLOTS, OUTPUT, LONGEST = 64, 32, 128


def bytes_each(count: int) -> float:
    """Bytes of a request that waits, engine and client together."""
    # imported where it is used: it needs what tests need
    from tests.jaxserve.test_waiting import PROMPT, System

    system = System()
    params = [SamplingParams(seed=index, detokenize=False) for index in range(count)]
    gc.collect()
    tracemalloc.start()
    for index in range(count):
        system.add(f"r{index}", params[index])
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = 2 * sys.getsizeof(PROMPT.copy())  # the engine's list and the client's
    return held / count - tokens


def plan_times(count: int, policy: str, steps: int, clients: int = 1) -> list[float]:
    """Seconds of each plan while so many requests of so many clients wait."""
    limits = SchedulerLimits(SLOTS, 256, 256, 16, LONGEST)
    pages = PageManager(SLOTS * LONGEST // 16 + 1, 16)
    config = EngineConfig(model="none", scheduling_policy=policy)
    scheduler = Scheduler(limits, pages, ClientTurns(partial(make_policy, config)))
    rule, params, added = StopRule(frozenset(), frozenset(), 0, OUTPUT), SamplingParams(), 0

    def add() -> None:
        nonlocal added
        prompt = [added % 7] * (8 + added % 90)
        turn = Queueing(0.0, client=str(added % clients))
        asked = AddGroup([str(added)], [0], prompt, params, rule, [], turn)
        scheduler.add(Request(str(added), asked))
        added += 1

    for _ in range(count):
        add()
    gc.collect()
    gc.freeze()  # as an engine does before it serves
    times: list[float] = []
    for step in range(steps + 3 * OUTPUT):  # until those with slots are at different tokens
        begin = time.perf_counter()
        plan = scheduler.plan()
        if step >= 3 * OUTPUT:
            times.append(time.perf_counter() - begin)
        seen = scheduler.commit(plan, [1] * len(plan.samples))
        for _ in seen.ends:
            add()
    gc.unfreeze()
    return times


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=1000, help="plans that are timed")
    options = parser.parse_args(arguments)
    require(parser, "test", "pytest", "hypothesis")
    print(
        "| that wait | bytes each | policy | clients | plan, median us | p99 us |\n"
        "|---:|---:|---|---:|---:|---:|"
    )
    for count in options.requests:
        size = f"{bytes_each(count):,.0f}"
        for policy, clients in itertools.product(SCHEDULING_POLICIES, options.clients):
            times = plan_times(count, policy, options.steps, clients)
            p99 = sorted(times)[len(times) * 99 // 100]
            print(
                f"| {count:,} | {size} | {policy} | {clients:,} | "
                f"{1e6 * statistics.median(times):.0f} | {1e6 * p99:.0f} |",
                flush=True,
            )
    print(f"\n{SLOTS} slots; {describe(environment())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

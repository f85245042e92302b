"""Faults under load: what becomes of the requests, and how long it takes to serve again.

Each fault meets an engine in a process of its own, on the bundled model, in the middle of requests
with known tokens. Printed are for each fault: requests that got a wrong token, that were cut
but called complete, and that were lost though they could have gone on; those that ended with an
error because they had to; and seconds from the fault to the first token after it.

    python -m benchmarks.verify.faults --quick
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.extras import require
from benchmarks.verify.faults.child import FILE_BYTES, MEMORY, PHASE_FILE, POISON
from checkpoints import bundled_model_path
from jaxserve.async_engine import AsyncEngine
from jaxserve.bench.measure import write_report
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.errors import EngineDeadError
from jaxserve.isolation.process_client import ProcessClient
from jaxserve.outputs import ERROR
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.tokenization.detokenizer import IncrementalDetokenizer

STEP_TIMEOUT_S = 1.0
LENGTH = 60
SLOTS = 8
QUICK_REQUESTS, QUICK_CLIENTS = 8, 200
SECTIONS = ("exceptions", "stalls", "poison", "disk", "clients")


@dataclass
class Outcome:
    """The results of the requests of one fault."""

    fault: str
    requests: int = 0
    wrong: int = 0
    cut: int = 0
    lost: int = 0
    errors: int = 0  # that had to be
    recovery_s: float | None = None

    def row(self) -> str:
        recovery = "-" if self.recovery_s is None else f"{self.recovery_s:.2f}"
        counts = (self.requests, self.wrong, self.cut, self.lost, self.errors)
        return f"| {self.fault} | {' | '.join(map(str, counts))} | {recovery} |"


class Load:
    """Requests with known tokens on one engine."""

    def __init__(self, engine: AsyncEngine, count: int):
        self.engine, self.count = engine, count
        self.expected: list[list[int]] = []
        self.times: list[float] = []  # of all outputs

    async def one(self, index: int, name: str, tokens: list[int], text: list[str]) -> str | None:
        params = SamplingParams(
            max_tokens=LENGTH,
            seed=index,
            temperature=0.8,
            ignore_eos=True,
            presence_penalty=0.5 * (index % 3 == 0),
            output_kind=RequestOutputKind.DELTA,
        )
        finish = None
        async for output in self.engine.generate([3 + index, 7, 9], params, name):
            self.times.append(time.monotonic())
            tokens += output.outputs[0].token_ids
            text.append(output.outputs[0].text)
            finish = output.outputs[0].finish_reason
        if finish == ERROR:  # what a server answers with 500
            raise RuntimeError("the request has ended with an error of its own")
        return finish

    async def learn(self) -> None:
        """The output of every request from an engine without a fault."""
        self.expected = [[] for _ in range(self.count)]
        await asyncio.gather(
            *[self.one(i, f"known-{i}", tokens, []) for i, tokens in enumerate(self.expected)]
        )

    async def meet(
        self, fault: str, strike: Callable[[], Awaitable[None]], unavoidable: int = 0
    ) -> Outcome:
        """Run all requests and strike in their middle."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        self.times.clear()
        tasks = [
            asyncio.ensure_future(self.one(i, f"{fault}-{i}", tokens, []))
            for i, tokens in enumerate(found)
        ]
        while not (found[0] and len(found[0]) > LENGTH // 5):
            await asyncio.sleep(0.002)
        struck = time.monotonic()
        await strike()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        outcome = Outcome(fault, self.count)
        lost = 0
        for tokens, end, known in zip(found, ends, self.expected, strict=True):
            outcome.wrong += tokens != known[: len(tokens)]
            if isinstance(end, BaseException):
                lost += 1
                assert isinstance(end, EngineDeadError | RuntimeError), end
            else:
                outcome.cut += tokens != known
        outcome.errors, outcome.lost = min(lost, unavoidable), max(0, lost - unavoidable)
        outcome.recovery_s = longest_silence(struck, self.times)
        return outcome


def longest_silence(since: float, times: list[float]) -> float:
    """Seconds without a token, the fault's to the next one or the longest after it."""
    moments = [since, *(moment for moment in sorted(times) if moment > since)]
    return max((b - a for a, b in itertools.pairwise(moments)), default=0.0)


@asynccontextmanager
async def engine_of(**settings: Any) -> AsyncIterator[AsyncEngine]:
    """A fresh engine: three deaths in a minute would end one.

    Small, so that it has few programs: what compiles beside the load would be measured with it.
    """
    sizes = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 128, "max_model_len": 256}
    config = EngineConfig.from_settings(model=str(bundled_model_path()), **(sizes | settings))
    watched = Isolation(step_timeout=STEP_TIMEOUT_S, module="benchmarks.verify.faults.child")
    engine = AsyncEngine(config, isolation=watched)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.shutdown()


def pid_of(engine: AsyncEngine) -> int:
    assert isinstance(engine.client, ProcessClient) and engine.client.pid is not None
    return engine.client.pid


def signals(engine: AsyncEngine, *numbers: signal.Signals, pause: float = 0.0) -> Any:
    async def strike() -> None:
        for number in numbers:
            os.kill(pid_of(engine), number)
            await asyncio.sleep(pause)

    return strike


def out_of_memory(engine: AsyncEngine) -> Any:
    async def strike() -> None:
        # none can be had any more; what it has may be enough to go on, so it is made to ask
        resource.prlimit(pid_of(engine), resource.RLIMIT_AS, (4096, 4096))
        await injected(engine, MEMORY)()

    return strike


def injected(engine: AsyncEngine, phase: str) -> Any:
    async def strike() -> None:
        Path(os.environ[PHASE_FILE]).write_text(phase)
        os.kill(pid_of(engine), signal.SIGUSR1)

    return strike


def poisoned(engine: AsyncEngine) -> Any:
    async def strike() -> None:
        try:
            async for _ in engine.generate([POISON, 5], SamplingParams(max_tokens=4), "poison"):
                pass  # whatever comes of it before the engine dies
        except EngineDeadError:
            return
        raise AssertionError("the poison was served")

    return strike


def untellable() -> Any:
    """The text of one token cannot be made."""

    async def strike() -> None:
        append = IncrementalDetokenizer.append

        def fail(self: IncrementalDetokenizer, token_id: int) -> str:
            IncrementalDetokenizer.append = append  # type: ignore[method-assign]
            raise RuntimeError("injected into detokenise")

        IncrementalDetokenizer.append = fail  # type: ignore[method-assign]

    return strike


async def run(options: argparse.Namespace) -> list[Outcome]:
    found: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        found.append(outcome)
        print(outcome.row(), flush=True)

    names = ("fault", "requests", "wrong", "cut", "lost", "errors", "silence, s")
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    count = QUICK_REQUESTS if options.quick else options.requests
    expected: list[list[int]] = []

    async def load_of(engine: AsyncEngine, most: int = count) -> Load:
        nonlocal expected
        if not expected:
            learner = Load(engine, count)
            await learner.learn()
            expected = learner.expected
        load = Load(engine, min(count, most))
        load.expected = expected[: load.count]
        return load

    # two deaths an engine: the third within a minute ends it
    pairs = [("plan", "pack"), ("dispatch", "fetch"), ("commit", None)]
    for pair in pairs if "exceptions" in options.only else []:
        async with engine_of() as engine:
            load = await load_of(engine)
            for phase in pair:
                if phase is None:
                    strike = signals(engine, signal.SIGKILL)
                    tell(await load.meet("SIGKILL", strike))
                else:
                    tell(await load.meet(f"exception in {phase}", injected(engine, phase)))
    if "stalls" in options.only:
        async with engine_of() as engine:
            load = await load_of(engine)
            tell(await load.meet("exception in detokenise", untellable(), unavoidable=1))
            pause = 0.6 * STEP_TIMEOUT_S
            stall = signals(engine, signal.SIGSTOP, signal.SIGCONT, pause=pause)
            tell(await load.meet(f"stopped for {pause:g} s", stall))
            tell(await load.meet("SIGSTOP", signals(engine, signal.SIGSTOP)))
            tell(await load.meet("out of memory (rlimit)", out_of_memory(engine)))
    if "poison" in options.only:
        async with engine_of() as engine:
            load = await load_of(engine, SLOTS - 1)  # none waits: it is to meet all of them
            tell(await load.meet("a request that crashes it (SIGSEGV)", poisoned(engine)))
    if "disk" in options.only:
        with tempfile.TemporaryDirectory() as cache:
            os.environ[FILE_BYTES] = "4096"
            # nothing can be kept: each engine compiles what it begins with, and no more
            async with engine_of(compilation_cache=cache, compile_in_background=False) as engine:
                load = await load_of(engine)
                tell(await load.meet("full disk, then SIGKILL", signals(engine, signal.SIGKILL)))
            del os.environ[FILE_BYTES]
    if "clients" in options.only:
        from benchmarks.verify.faults import vanish  # where it is used: it needs psutil

        clients = QUICK_CLIENTS if options.quick else options.clients
        left, seconds, same = await vanish.meet(clients)
        tell(Outcome(f"{clients} clients vanish", clients, int(not same), 0, left, 0, seconds))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 requests, 200 clients")
    parser.add_argument("--requests", type=int, default=24, help="at a time (default: 24)")
    parser.add_argument("--clients", type=int, default=1000, help="that vanish (default: 1000)")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="parts (default: all)"
    )
    options = parser.parse_args(arguments)
    if "clients" in options.only:
        require(parser, "test", "psutil")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[PHASE_FILE] = str(Path(folder) / "phase")
        found = asyncio.run(run(options))
    write_report(options.output_json, faults=[asdict(one) for one in found])
    return int(any(one.wrong or one.cut or one.lost for one in found))


if __name__ == "__main__":
    sys.exit(main())

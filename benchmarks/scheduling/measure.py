"""A trace on a real engine in this process, by the wall clock or by the processor's."""

from __future__ import annotations

import os
import random
import time
from typing import Protocol

from benchmarks.scheduling.served import Served
from benchmarks.scheduling.trace import Item
from jaxserve import LLM
from jaxserve.bench.workloads import random_tokens
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams


class Clock(Protocol):
    """Tells the time of a run, and lets an idle engine wait."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ProcessorClock:
    """Seconds of processor time of this process, which is kept on one core.

    A core with nothing else to do would take as long, whatever shares it here; an idle engine
    does not wait, but the clock goes on.
    """

    def __init__(self) -> None:
        self._idle = 0.0

    @staticmethod
    def use_one_core() -> None:
        """To be called before jax counts the cores that it may use."""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    def now(self) -> float:
        return time.process_time() + self._idle

    def sleep(self, seconds: float) -> None:
        self._idle += seconds


def make_llm(model: str, policy: str, max_num_seqs: int, max_num_batched_tokens: int) -> LLM:
    """An engine that compiles nothing any more and fits the trace's lengths."""
    return LLM(
        model,
        scheduling_policy=policy,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        compile_ahead=1000,
        compile_in_background=False,
        enable_prefix_caching=False,  # the same trace is served by both policies
    )


def measure(llm: LLM, items: list[Item], seed: int, clock: Clock) -> list[Served]:
    """Serve a trace; requests are added when they come, between two steps."""
    rng, vocab = random.Random(seed), llm.model_config.vocab_size
    prompts = [random_tokens(rng, item.prompt_len, vocab) for item in items]
    client = llm.client
    first: dict[str, float] = {}
    found: dict[str, Served] = {}
    coming, begin = 0, clock.now()
    while len(found) < len(items):
        now = clock.now() - begin
        while coming < len(items) and items[coming].arrival <= now:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=items[coming].output_len,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            client.add(client.prepare(prompts[coming], params, str(coming)))
            coming += 1
        if not client.has_work:
            clock.sleep(max(0.0, items[coming].arrival - now))
            continue
        outputs = client.outputs()
        now = clock.now() - begin
        for output in outputs:
            begun = first.setdefault(output.request_id, now)
            if output.finished:
                found[output.request_id] = Served(items[int(output.request_id)], begun, now)
    return [found[str(index)] for index in range(len(items))]

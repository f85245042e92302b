"""Random schedules of requests, and the answers of each request alone."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.determinism.requests import MOST_TOKENS, Asked, Told, told
from jaxserve import LLM

LATEST = 16  # step of the last arrival


class Arrival(NamedTuple):
    """A request of a schedule.

    Attributes:
        index: of the request.
        step: before which it comes.
        leaves: step before which its caller gives it up; None: it is answered.
    """

    index: int
    step: int
    leaves: int | None


class Run(NamedTuple):
    """What a schedule gave: answers by the place among the arrivals; what the engine did beside."""

    answers: dict[int, Told]
    counts: Counter[str]


def fitting(requests: Sequence[Asked], longest: int) -> list[int]:
    """Indices of the requests that an engine serves of so many tokens at most."""
    return [i for i, one in enumerate(requests) if len(one.prompt) + MOST_TOKENS <= longest]


def drawn(rng: random.Random, indices: Sequence[int], most: int) -> list[Arrival]:
    """A schedule of 2 to `most` of some requests; the same one may come more than once."""
    spread = rng.choice([1, 4, LATEST])
    arrivals = []
    for _ in range(rng.randint(2, most)):
        step = rng.randrange(spread)
        leaves = step + rng.randrange(1, 10) if rng.random() < 0.1 else None
        arrivals.append(Arrival(rng.choice(indices), step, leaves))
    return arrivals


def run(llm: LLM, requests: Sequence[Asked], arrivals: Sequence[Arrival]) -> Run:
    """Serve a schedule, and tell how each of its requests was answered."""
    engine = llm.llm_engine
    answers: dict[int, Told] = {}
    before, step = engine.stats(), 0
    coming = sorted(range(len(arrivals)), key=lambda place: arrivals[place].step)
    leaving = {p: one.leaves for p, one in enumerate(arrivals) if one.leaves is not None}
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            step = max(step, arrivals[coming[0]].step)
        while coming and arrivals[coming[0]].step <= step:
            place = coming.pop(0)
            asked = requests[arrivals[place].index]
            engine.add_request(str(place), asked.prompt, copy.deepcopy(asked.params))
        engine.abort_request([str(place) for place, last in leaving.items() if last == step])
        for output in engine.step():
            if output.finished and int(output.request_id) not in leaving:
                answers[int(output.request_id)] = told(output)
        step += 1
    after = engine.stats()
    counts = Counter(
        preemptions=after.num_preemptions - before.num_preemptions,
        found=(after.pages.num_found - before.pages.num_found) // after.pages.page_size,
        requests=len(answers),
        steps=step,
    )
    return Run(answers, counts)


def alone(llm: LLM, requests: Sequence[Asked]) -> list[Told]:
    """How each request is answered by itself, with nothing in the prefix cache."""
    found = []
    for index in range(len(requests)):
        llm.reset_prefix_cache()
        found.append(run(llm, requests, [Arrival(index, 0, None)]).answers[0])
    return found


# engines that answer as the one that answers each request alone; few pages make requests lose slots
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short of pages": {"num_pages": 18, "max_model_len": 160},
    "small chunks": {"prefill_chunk": 37, "max_num_batched_tokens": 48, "max_num_seqs": 24},
    "without a prefix cache": {"enable_prefix_caching": False, "num_pages": 130},
    "small pages, no overlap": {
        "block_size": 8,
        "num_pages": 34,
        "max_model_len": 160,
        "overlap": False,
    },
}

"""A bimodal trace: many short prompts, few long ones, Poisson arrivals."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jaxserve.bench.arrivals import arrival_times

SHORT = (16, 127)  # prompt tokens, both ends included
LONG = (1000, 1800)
OUTPUT = (16, 48)
SHARE_SHORT = 0.8


@dataclass(frozen=True, slots=True)
class Item:
    """One request: when it comes, in seconds, and its lengths in tokens."""

    arrival: float
    prompt_len: int
    output_len: int

    @property
    def is_short(self) -> bool:
        return self.prompt_len <= SHORT[1]


def bimodal(count: int, rate: float, seed: int) -> list[Item]:
    """`count` requests at `rate` a second, `float("inf")` for all at once.

    The lengths of a seed are the same at every rate.
    """
    rng = random.Random(seed)
    shapes = []
    for _ in range(count):
        prompt = rng.randint(*(SHORT if rng.random() < SHARE_SHORT else LONG))
        shapes.append((prompt, rng.randint(*OUTPUT)))
    times = arrival_times(count, rate, seed=seed)
    return [Item(time, *shape) for time, shape in zip(times, shapes, strict=True)]

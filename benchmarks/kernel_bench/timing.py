"""Seconds of one operation on the device, without what the host spends to launch it.

A candidate is a program of several operations, one after the other, each on data of its own that is
not in the cache. It is dispatched many times without waiting, twice: the difference between a long
and a short series, over the difference of their lengths, holds neither the launch of the first nor
the wait for the last. Candidates of one case take turns, and the median over the turns counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.isolated import describe

SERIES_SECONDS = 0.03  # of the long series of one sample
LONGEST_SERIES = 400
SHORT_PART = 4  # the short series has a fourth of the calls
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of a case, compiled, with its operands on the device.

    Attributes:
        name: in the table.
        sample: measures once; seconds of one operation.
        result: the output of the first program call, to be compared with the other candidates'.
    """

    name: str
    sample: Callable[[], float]
    result: Callable[[], np.ndarray] | None = None


def difference(seconds_of: Callable[[int], float], short: int, long: int) -> float:
    """Seconds of one call from a short and a long series of calls.

    Falls back on nothing: on a machine so noisy that the long series is not longer, it is NaN.
    """
    first, second = seconds_of(short), seconds_of(long)
    return (second - first) / (long - short) if second > first else math.nan


def jax_candidate(
    name: str,
    program: Callable[..., Any],
    rotations: Sequence[tuple[Any, ...]],
    operations: int,
    *,
    short_series: bool = False,
) -> Candidate:
    """A compiled JAX program as a candidate.

    Args:
        name: in the table.
        program: compiled; called with the operands of one rotation.
        rotations: operands that name different data each, taken in turn.
        operations: how many operations one call of the program makes.
        short_series: two calls are enough: the numbers mean nothing (a dry run).
    """
    # the first call loads the program, the second one is timed to choose the series
    jax.block_until_ready(program(*rotations[0]))
    begin = time.perf_counter()
    jax.block_until_ready(program(*rotations[-1]))
    once = time.perf_counter() - begin
    long = max(SHORT_PART, min(LONGEST_SERIES, math.ceil(SERIES_SECONDS / max(once, 1e-6))))
    if short_series:
        long = 2
    short = max(1, long // SHORT_PART)

    def series(calls: int) -> float:
        begin = time.perf_counter()
        for call in range(calls):
            result = program(*rotations[call % len(rotations)])
        jax.block_until_ready(result)
        return time.perf_counter() - begin

    def result() -> np.ndarray:
        found = program(*rotations[0])
        first = found[0] if isinstance(found, (tuple, list)) else found
        return np.asarray(first.astype("float32"))

    return Candidate(name, lambda: difference(series, short, long) / operations, result)


def poisons(error: Exception) -> bool:
    """Whether nothing on the device can be trusted after it: its errors, but for full memory."""
    from_device = isinstance(error, jax.errors.JaxRuntimeError)
    return from_device and "RESOURCE_EXHAUSTED" not in str(error)


def interleaved(
    candidates: Sequence[Candidate], rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, str]]:
    """The median seconds of each candidate, taken in turns, and why some could not be timed."""
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for candidate in candidates:
            if candidate.name in failed:
                continue
            try:
                samples[candidate.name].append(candidate.sample())
            except Exception as error:  # told in the candidate's row
                if poisons(error):
                    raise
                failed[candidate.name] = describe(error)
    medians = {}
    for name, found in samples.items():
        if name not in failed:
            usable = [seconds for seconds in found if math.isfinite(seconds)]
            medians[name] = statistics.median(usable) if usable else math.nan
    return medians, failed


def relative_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """|found - wanted| / |wanted| as vectors; infinite where found is not finite."""
    found, wanted = found.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return math.inf
    return float(np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))

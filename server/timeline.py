"""The engine's last seconds in slices of a tenth: how many rows were computed, and how busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jaxserve.boundary.step_history import StepHistory

SLICE_S = 0.1
KEPT_S = 60.0
DIGITS = 4


class Timeline:
    """Slices of a history of steps.

    A slice is `[index, steps, decode, prefill, busy, decode tokens, prefill tokens]`. Its index is
    its place in time, in units of SLICE_S; steps and tokens belong to the slice in which their step
    ended; decode and prefill are rows times the seconds of the slice in which they were computed,
    and busy are the seconds in which the device computed, of several engines their mean.
    """

    def __init__(self) -> None:
        self._slices: dict[int, list[Any]] = {}
        # when the last step of each engine that was taken in had ended
        self._last = defaultdict[int, float](float)

    def take(self, histories: Sequence[StepHistory], now: float) -> list[list[Any]]:
        """Take in the steps of each engine that have ended since the last call; what they add."""
        new: dict[int, list[Any]] = {}
        for number, history in enumerate(histories):
            self._add(new, number, history, len(histories), now)
        for index, added in new.items():
            known = self._slices.get(index)
            self._slices[index] = added if known is None else [*map(sum, zip(known, added))]
        oldest = int((now - KEPT_S) / SLICE_S)
        for index in [index for index in self._slices if index < oldest]:
            del self._slices[index]
        return _listed(new)

    def _add(
        self, new: dict[int, list[Any]], number: int, history: StepHistory, engines: int, now: float
    ) -> None:
        """Add the new steps of one of so many engines to slices."""
        before = self._last[number]
        for step in history.after(max(before, now - KEPT_S)):
            end = step.fetched
            begin = max(step.dispatched, before, end - KEPT_S)
            before = end
            first, last = int(begin / SLICE_S), int(end / SLICE_S)
            one = new.setdefault(last, [0, 0.0, 0.0, 0.0, 0, 0])
            one[0] += 1
            one[4] += step.num_decode_tokens
            one[5] += step.num_prefill_tokens
            edges = [index * SLICE_S for index in range(first + 1, last + 1)]
            for left, right in pairwise([begin, *edges, end]):
                part = right - left
                index = int((left + right) / 2 / SLICE_S)
                one = new.setdefault(index, [0, 0.0, 0.0, 0.0, 0, 0])
                one[1] += step.num_decode * part
                one[2] += step.num_prefill * part
                one[3] += step.device_busy * (part / (end - begin) if edges else 1.0) / engines
        self._last[number] = before

    def bins(self) -> list[list[Any]]:
        """All slices of the last KEPT_S seconds in which there was something."""
        return _listed(self._slices)


def _listed(slices: dict[int, list[Any]]) -> list[list[Any]]:
    return [
        [index, one[0], *(round(value, DIGITS) for value in one[1:4]), *one[4:]]
        for index, one in sorted(slices.items())
    ]

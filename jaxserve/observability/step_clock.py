"""Measures where the time of steps goes: on the engine's side, and on the client's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from time import monotonic, thread_time
from typing import Any

from jaxserve.boundary.messages import FirstStep
from jaxserve.boundary.step_history import StepRecord
from jaxserve.boundary.step_times import StepTimes
from jaxserve.request.request import Request


class StepClock:
    """An engine calls it at the phases of its steps, in their order; they add up in `times`.

    Attributes:
        times: the sums over all steps.
        last: the step of the last call of `committed`, until the next one begins; else None.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._mark = 0.0
        self._last_fetch = (0.0, 0.0)  # when the host began to wait for a step, and when it had it
        self._last_dispatch = 0.0
        self.last: StepRecord | None = None
        self._num_dispatched = 0
        # fields of `StepRecord` that are known of steps, in flight and before their commit
        self._in_flight: deque[dict[str, Any]] = deque()
        self._fetched: dict[str, Any] | None = None
        self._host = (0.0, 0.0, 0.0)  # of the step that is being made: its begin, plan and pack
        self._busy_before = 0.0  # device_busy when the step before was fetched
        self._running: Any = None  # result of the step in flight when the next one was packed
        self._drained = False  # the device had run out of work then
        self._backlog_since_commit = False
        self._arrivals: dict[str, float] = {}  # of sequences that no step has held yet
        self._new: set[str] = set()  # came after the last plan
        self._newcomers: set[str] = set()  # of the last plan: those that came after the one before
        self._first_steps: dict[str, FirstStep] = {}
        self._page_waits: list[float] = []

    def added(self, sequence_id: str, arrival_time: float) -> None:
        self._arrivals[sequence_id] = arrival_time
        self._new.add(sequence_id)

    def aborted(self, sequence_id: str) -> None:
        self._arrivals.pop(sequence_id, None)

    def lacks_pages(self, request: Request) -> None:
        """It has lost its pages, or its turn has come and too few are free."""
        if request.lacks_pages_since is None:
            request.lacks_pages_since = self._mark

    def start(self) -> None:
        """A phase begins."""
        self._mark = monotonic()

    def planned(self) -> None:
        begin = self._mark
        lap = self._lap()
        self.times.plan += lap
        self._host = begin, lap, 0.0
        self._newcomers, self._new = self._new, set()

    def paused(self) -> None:
        """No plan was made: requests have waited for no work of the host's."""
        self._new.clear()

    def packed(self, running: Any) -> None:
        """The plan is packed; `running` is the result of the step in flight, None without one."""
        lap = self._lap()
        self.times.pack += lap
        self._host = *self._host[:2], lap
        self._running = running
        self._drained = self._backlog_since_commit if running is None else running.is_ready()

    def dispatched(self, requests: Iterable[Request], counts: Mapping[str, int]) -> None:
        """The step was handed over.

        Args:
            requests: those that may be in their first one.
            counts: the fields of its `StepRecord` that are known when it is planned.
        """
        ready = self._mark
        lap = self._lap()
        self.times.dispatch += lap
        running, self._running = self._running, None
        idle = 0.0
        if self._drained:
            # the device cannot have been done before it was given the step
            idle = self._mark - max(self._last_fetch[1], self._last_dispatch)
        elif running is not None and running.is_ready():
            idle = self._mark - ready
        self.times.device_idle += idle
        if running is not None:
            self.times.device_busy -= idle  # `fetched` will take it for a part of the running step
        self._last_dispatch = self._mark
        begin, plan, pack = self._host
        moments = {"number": self._num_dispatched, "begin": begin, "dispatched": self._mark}
        self._in_flight.append({**counts, **moments, "plan": plan, "pack": pack, "dispatch": lap})
        self._num_dispatched += 1
        for request in requests:
            arrival = self._arrivals.pop(request.request_id, None)
            since, request.lacks_pages_since = request.lacks_pages_since, None
            if since is not None or arrival is not None:
                self._page_waits.append(0.0 if since is None else ready - since)
            if arrival is not None:
                self._first_steps[request.request_id] = self._first_step(request, arrival, ready)

    def fetched(self) -> None:
        begin = self._mark
        lap = self._lap()
        self.times.wait += lap
        step = self._in_flight.popleft()
        since = max(step["dispatched"], self._last_fetch[1])
        self.times.device_busy += self._mark - since
        self._last_fetch = begin, self._mark
        busy, self._busy_before = self._busy_before, self.times.device_busy
        step |= {"fetched": self._mark, "wait": lap, "device_busy": self._busy_before - busy}
        self._fetched = step

    def committed(self, *, backlog: bool) -> dict[str, FirstStep]:
        """The step is over, `backlog`: with nothing in flight though sequences are unfinished.

        Returns the sequences that had their first step dispatched in it.
        """
        lap = self._lap()
        self.times.commit += lap
        self.last = None
        if self._fetched is not None:
            self.last, self._fetched = StepRecord(**self._fetched, commit=lap), None
        self._backlog_since_commit = backlog
        found, self._first_steps = self._first_steps, {}
        return found

    def take_page_waits(self) -> list[float]:
        """Seconds that sequences waited for pages, which have a slot since the last call."""
        found, self._page_waits = self._page_waits, []
        return found

    def _lap(self) -> float:
        before, self._mark = self._mark, monotonic()
        return self._mark - before

    def _first_step(self, request: Request, arrival: float, now: float) -> FirstStep:
        found = request.num_cached or 0
        if request.request_id not in self._newcomers:
            return FirstStep(now, None, found)
        begin, end = self._last_fetch
        return FirstStep(now, now - arrival - max(0.0, end - max(begin, arrival)), found)


class ClientClock:
    """Measures what the client's thread spends on the tokens that it is given.

    Args:
        whole_thread: measure as well what else the thread computes while requests run.

    Attributes:
        elsewhere: seconds of text, and of the rest, that threads of other processes have spent.
    """

    def __init__(self, *, whole_thread: bool = False):
        self._whole_thread = whole_thread
        self.elsewhere = (0.0, 0.0)
        self._text = 0.0
        self._mark = 0.0
        self._thread = 0.0  # processor time: waiting for a socket does not count
        self._thread_since = 0.0
        self._other = 0.0

    def now(self) -> float:
        """The moment, in seconds of `time.monotonic()`."""
        return monotonic()

    def begin_text(self) -> None:
        self._mark = monotonic()

    def end_text(self) -> None:
        self._text += monotonic() - self._mark

    def resume(self) -> None:
        """The first request comes: what the thread computed while idle is of no step."""
        self._thread_since = thread_time()

    def add_to(self, times: StepTimes) -> StepTimes:
        """An engine's times and what this thread has spent."""
        if self._whole_thread:
            since, self._thread_since = self._thread_since, thread_time()
            self._thread += self._thread_since - since
            self._other = max(self._other, self._thread - self._text)  # never less than before
        told = times.copy()
        text, other = self.elsewhere
        told.detokenise, told.http = self._text + text, self._other + other
        return told

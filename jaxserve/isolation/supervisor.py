"""Starts an engine's process, watches it, and starts another one when it has died.

One thread starts the process and reads what it says; another one watches that it says something
while it has work. What is said, and that a process is there or has died, are events in the order in
which they happened, for the thread that uses them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from jaxserve.boundary.messages import Body, StepEstimate, StepOutput
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.errors import EngineDeadError, JaxServeError
from jaxserve.liveness.pulse import BEAT_S, Pulse
from jaxserve.liveness.silence import Silence
from jaxserve.observability.numbered_log import Log
from jaxserve.processes.engine_process import EngineProcess
from jaxserve.processes.launch import ANYWHERE, EarlyProcess, Place
from jaxserve.processes.spare import Spare
from jaxserve.processes.wire import Ready, Start, StartRefusal

logger = logging.getLogger(__name__)

MOST_DEATHS = 3  # within DEATHS_S, or in a row without a token served: then it is given up
DEATHS_S = 60.0
MOST_CONVICTIONS = 10  # in a row without a token served: it is not all those requests' doing
CLOSE_S = 5.0  # that a process gets to end when it is told to
LOAD_SLACK_S, LOAD_FACTOR = 60.0, 2.0  # that a later engine may take, and times the first one
LEAST_AHEAD = 1  # programs: the first one serves any step


class EngineStart(NamedTuple):
    """An engine is ready, and knows of no request."""

    process: EngineProcess


class EngineDeath(NamedTuple):
    """It has died, and another one is being started."""

    how: str


@dataclass(slots=True)
class _Load:
    """Seconds that an engine has been loading, without those in which this process was stopped."""

    seconds: float = 0.0


class Supervisor:
    """Keeps a process with an engine running.

    Args:
        config: what the user asked for.
        isolation: how it is watched.
        on_start: called once, in the supervisor's thread, while the first engine loads; an error of
            it ends everything.
        on_ready: called once, in the supervisor's thread, with the first engine's `Ready`.
        has_work: called in the watchdog's thread; whether the engine owes an answer.
        notify: called in the supervisor's thread when there is an event, and when it has ended.
        early: the first process, where it has been started already.
        place: the part of the machine that each process gets.
        log: of what becomes of them.

    Attributes:
        events: what has happened and was not taken yet; one thread takes them.
        silence: counts the silence of the engine that serves.
        loaded: set once the first engine was ready.
        serving: set while one is.
        ended: set once none will be.
        error: what has ended it; None after `close`.
    """

    def __init__(
        self,
        config: EngineConfig,
        isolation: Isolation,
        *,
        on_start: Callable[[], None],
        on_ready: Callable[[Ready], None],
        has_work: Callable[[], bool],
        notify: Callable[[], None],
        early: EarlyProcess | None = None,
        place: Place = ANYWHERE,
        log: Log = logger,
    ):
        self.events: deque[Body | EngineStart | EngineDeath] = deque()
        self.loaded, self.serving, self.ended = (threading.Event() for _ in range(3))
        self.error: BaseException | None = None
        self.silence = Silence(isolation.step_timeout)
        self._asked, self._isolation, self._log = config, isolation, log
        self._on_start, self._on_ready = on_start, on_ready
        self._has_work, self._notify = has_work, notify
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-supervisor", daemon=True)
        self._early = early
        self._make = partial(EngineProcess, isolation.module, place=place)
        self._current: EngineProcess | None = None
        self._is_busy = False  # by what the engine has said last
        self._spare = Spare(self._make)
        self._load: _Load | None = None  # counted by the watchdog while an engine loads
        self._load_seconds: float | None = None  # of the first engine
        self._counting = threading.Lock()
        self._deaths: deque[float] = deque()
        self._in_a_row = self._convictions = 0
        self._forgiven = 0  # deaths in a row, once an engine has served its probe

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None while there is none."""
        current = self._current
        return None if current is None else current.pid

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    def forgive(self, deaths: int) -> None:
        """The last deaths were the doing of one request, which is gone.

        That they came in a row counts until an engine has served its own probe: the death of
        one that serves no request is no request's doing.
        """
        with self._counting:
            for _ in range(min(deaths, len(self._deaths))):
                self._deaths.pop()
            self._forgiven = deaths
            self._convictions += 1
            if self.serving.is_set():
                self._forget_forgiven()

    def close(self) -> None:
        """Start no other process; one that loads is killed."""
        self._closing.set()
        if self._current is not None and not self.serving.is_set():
            self._current.kill()

    def join(self) -> None:
        """Wait for the process, which has been told to end."""
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive() and self._current is not None:
                self._current.kill()
            self._thread.join()
        self.ended.set()

    # -- the supervising thread ------------------------------------------------------------------

    def _run(self) -> None:
        watchdog = threading.Thread(target=self._watch, name="jaxserve-watchdog", daemon=True)
        watchdog.start()
        try:
            while not self._closing.is_set():
                how = self._serve_once()
                self.serving.clear()
                if self._closing.is_set():
                    break
                self._count_death(how)
                self._tell(EngineDeath(how))
        except BaseException as error:
            self.error = error
            if not isinstance(error, JaxServeError):
                self._log.exception("the supervisor of the engine's process ended with an error")
        finally:
            self.serving.clear()
            if self._current is not None:
                self._current.kill()
            self._spare.close()
            self.ended.set()
            self._notify()

    def _tell(self, event: Body | EngineStart | EngineDeath) -> None:
        self.events.append(event)
        self._notify()

    def _serve_once(self) -> str:
        """The life of one process; how it ended."""
        level = logging.getLogger("jaxserve").getEffectiveLevel()
        start = Start(self._asked, level, self._isolation.log_format)
        early, self._early = self._early, None
        try:
            process = self._spare.take() or self._make(early)
        except EngineDeadError as error:
            if not self.loaded.is_set():
                raise
            return f"did not start: {error}"
        self._current = process
        process.send(start)
        self._load = _Load()
        if self._closing.is_set():
            process.kill()
        try:
            if not self.loaded.is_set():
                self._on_start()  # while the process loads
            body = process.receive()
            if body is not None:
                self._is_there(process, body)
            while (body := process.receive()) is not None:
                self.silence.heard()
                if isinstance(body, StepEstimate):
                    self.silence.expect(body.seconds, compiles=body.compiles)
                elif isinstance(body, StepOutput):
                    stats = body.stats
                    self._is_busy = stats.num_running > 0 or stats.num_waiting > 0
                    if body.tokens:
                        self._in_a_row = self._convictions = 0
                self._tell(body)
        finally:
            self._load = None
            how = process.wait(CLOSE_S)
        if not self.loaded.is_set() and not self._closing.is_set():
            raise EngineDeadError(f"the engine's process {how} while it loaded")
        return how

    def _is_there(self, process: EngineProcess, body: Body) -> None:
        if isinstance(body, StartRefusal):
            if not self.loaded.is_set():
                raise EngineDeadError(body.text)
            self._log.error("the engine cannot be loaded again: %s", body.text)
            return
        assert isinstance(body, Ready)
        load, self._load = self._load, None
        if self._load_seconds is None and load is not None:
            self._load_seconds = load.seconds
        if not self.loaded.is_set():
            self._on_ready(body)
            self._asked = again(self._asked, body)
            self.loaded.set()
        else:
            self._log.warning("the engine serves again")
        self.silence.begin()
        self._is_busy = False
        with self._counting:
            self.serving.set()
            self._forget_forgiven()
        self._tell(EngineStart(process))
        if self._isolation.spare:
            self._spare.prepare()

    def _forget_forgiven(self) -> None:
        self._in_a_row, self._forgiven = max(0, self._in_a_row - self._forgiven), 0

    def _count_death(self, how: str) -> None:
        """Raises EngineDeadError once it has died too often."""
        now = time.monotonic()
        with self._counting:
            self._deaths.append(now)
            self._in_a_row += 1
            while now - self._deaths[0] > DEATHS_S:
                self._deaths.popleft()
            is_too_often = (
                max(len(self._deaths), self._in_a_row) >= MOST_DEATHS
                or self._convictions >= MOST_CONVICTIONS
            )
        self._log.error("the engine's process %s", how)
        if is_too_often:
            raise EngineDeadError(
                f"the engine's process died {MOST_DEATHS} times within {DEATHS_S:.0f} s or without "
                f"serving anything between, or {MOST_CONVICTIONS} requests in a row ended it: it "
                f"is given up. The last one {how}"
            )

    # -- the watchdog's thread -------------------------------------------------------------------

    def _watch(self) -> None:
        """Kill an engine that has work and says nothing, or loads for too long."""
        limits = self._isolation.step_timeout, self._isolation.load_timeout
        given = [one / 4 for one in limits if isinstance(one, int | float)]
        pulse, reason = Pulse(), None
        while not self.ended.wait(min([BEAT_S, *given])):
            seconds = pulse.beat()
            if not seconds:  # this process was stopped too: nothing could be heard
                continue
            self._check_loading(seconds)
            if not self.serving.is_set():
                self.silence.heard()
                reason = None
                continue
            # where its words are not taken yet, they may be all that requests wait for
            has_work = self._has_work() and (self._is_busy or not self.events)
            self.silence.tick(seconds, has_work=has_work)
            before, reason = reason, self.silence.reason
            if before is None and reason is not None:
                self._log.warning("%s: no others are let in", reason)
            elif reason is None and before is not None:
                self._log.warning("the engine steps again")
            if self.silence.is_hung:
                self._kill_hung()

    def _kill_hung(self) -> None:
        limit = self.silence.step_timeout
        self._log.error(
            "no step has ended within the step timeout, %g s: the engine is killed", limit
        )
        self.serving.clear()
        if self._current is not None:
            self._current.kill()

    def _check_loading(self, seconds: float) -> None:
        """A later one may take longer than the first: the machine may be busy by then."""
        load, first = self._load, self._load_seconds
        most = self._isolation.load_timeout
        if first is not None:
            most = LOAD_SLACK_S + LOAD_FACTOR * first
        if load is None:
            return
        load.seconds += seconds
        if most is None or load.seconds < most:
            return
        self._log.error(
            "the engine has been loading for %.0f s, %.0f are allowed", load.seconds, most
        )
        self._load = None
        if self._current is not None:
            self._current.kill()


def again(asked: EngineConfig, ready: Ready) -> EngineConfig:
    """What the next process is told: the files that are here, and what requests were promised.

    The process takes all memory that is free, since the other engines have theirs. It begins as
    soon as it can, where the rest is compiled in the background.
    """
    resolved, programs = ready.config, ready.config.programs
    return replace(
        asked,
        model=ready.model_folder,
        tokenizer=ready.tokenizer_folder,
        revision=None,
        tokenizer_revision=None,
        hf_token=None,
        data_parallel_size=1,
        max_model_len=resolved.scheduler.max_model_len,
        compile_ahead=LEAST_AHEAD if programs.compile_in_background else programs.compile_ahead,
    )

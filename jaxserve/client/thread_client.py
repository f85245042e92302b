"""The client of an engine that has a thread of its own.

The thread owns the engine, from loading to the end. Messages go in through one queue. Outputs come
out through another, and a callback tells the caller of them.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from checkpoints import CheckpointError
from jaxserve.boundary.messages import Body, StepEstimate, StepOutput
from jaxserve.client.engine_client import EngineClient
from jaxserve.config.engine_config import EngineConfig
from jaxserve.engine.loop import Engine
from jaxserve.engine.pace import Pace
from jaxserve.errors import EngineDeadError, JaxServeError, ShutdownError, ValidationError
from jaxserve.liveness.pulse import BEAT_S, Pulse
from jaxserve.liveness.silence import Silence
from jaxserve.loading.engine_build import load_engine
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import RequestOutput

logger = logging.getLogger(__name__)


class ThreadClient(EngineClient):
    """Loads an engine and serves in the background.

    Args:
        asked: the user's settings; the resolved `config` is set once the client is ready.
        clock: of the thread that uses the client.
        notify: called in the engine's thread when outputs have come, and when the engine has ended.

    Raises:
        ValidationError: several engines were asked for.
    """

    def __init__(self, asked: EngineConfig, clock: ClientClock, notify: Callable[[], None]):
        super().__init__(asked.model_names[0], asked.metrics_prefix, clock)
        if asked.data_parallel_size > 1:
            allowed = "1 where the engine is a thread of this process, which has one"
            raise ValidationError("data_parallel_size", asked.data_parallel_size, allowed)
        self.metrics.watch_processes({"server": os.getpid})
        self.asked = asked
        self.error: BaseException | None = None
        self._notify = notify
        self._ready, self._ended = threading.Event(), threading.Event()
        self._sent: queue.SimpleQueue[Body] = queue.SimpleQueue()
        self._received: deque[StepOutput] = deque()
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._pulse, self._silence = Pulse(), Silence(None)

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """True once the engine is warmed up, until it ends."""
        return self._ready.is_set() and not self._ended.is_set()

    @property
    def is_restarting(self) -> bool:
        """False: an engine in this process is not restarted."""
        return False

    @property
    def silence(self) -> str | None:
        """Why the engine seems to hang, in words; None: it does not."""
        return self._silence.reason if self.is_ready else None

    @property
    def is_dead(self) -> bool:
        """True once the thread has ended, by an error or by `close`."""
        return self._ended.is_set()

    def check_alive(self) -> None:
        if self._ended.is_set():
            raise self.death()
        if not self._ready.is_set():
            raise EngineDeadError("the engine is still loading")

    def death(self) -> EngineDeadError:
        """A new error for each caller, with the reason as its cause."""
        error = self.error
        if error is None:
            return ShutdownError("the engine was shut down: make a new one, or restart the server")
        if isinstance(error, EngineDeadError):
            death = EngineDeadError(str(error))
            death.__cause__ = error.__cause__
        else:
            text = "the engine has ended with an error: make a new one, or restart the server"
            death = EngineDeadError(text)
            death.__cause__ = error
        return death

    def outputs(self) -> list[RequestOutput]:
        is_dead = self.is_dead  # nothing comes after that
        found: list[RequestOutput] = []
        while self._received:
            found += self._take(self._received.popleft())
        found += self._expired()
        if not found and is_dead:
            raise self.death()
        return found

    def join(self) -> None:
        """Wait for the thread, which `close` ends."""
        if self._thread.is_alive():
            self._thread.join()
        self._ended.set()

    def _post(self, body: Body) -> None:
        self._silence.asked()
        self._sent.put(body)

    # -- the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        engine: Engine | None = None
        try:
            loaded = load_engine(self.asked)
            engine, decided = loaded.engine, loaded.decided
            told = decided.model, loaded.tokenizer, loaded.page_bytes, decided.model_path
            self._bind(decided.config, *told)
            engine.pace = Pace(engine.runner, self._expect, self._pulse)
            self._ready.set()
            threading.Thread(target=self._watch, name="jaxserve-watchdog", daemon=True).start()
            self._serve(engine)
        except BaseException as error:
            self.error = error
            # errors that loading raises on purpose need no traceback
            if engine is not None or not isinstance(error, (JaxServeError, CheckpointError)):
                logger.exception("the engine thread ended with an error")
        finally:
            self._ended.set()
            self._notify()
            if engine is not None:
                engine.close()

    def _serve(self, engine: Engine) -> None:
        while True:
            # an idle engine blocks here until a message comes
            self._handle_sent(engine, wait=engine.is_idle)
            if engine.is_closed:
                return
            self._received.append(engine.step())
            self._silence.heard()
            self._notify()

    def _expect(self, expected: StepEstimate) -> None:
        self._silence.expect(expected.seconds, compiles=expected.compiles)

    def _handle_sent(self, engine: Engine, *, wait: bool) -> None:
        try:
            engine.handle(self._sent.get(block=wait))
            while not engine.is_closed:  # later messages are not read
                engine.handle(self._sent.get_nowait())
        except queue.Empty:
            return

    # -- the watchdog's thread -------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            # outputs that are not taken yet may be all that requests wait for
            has_work = self.has_work and not self._received and not self.is_paused
            self._silence.tick(self._pulse.beat(), has_work=has_work)

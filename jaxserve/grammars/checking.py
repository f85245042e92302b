"""Which grammars may be compiled where requests are served: those that a process of its own could.

`child.py` is that process. What it says of a text is kept, so a schema is tried once.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import CompilerBusyError, ShutdownError, ValidationError
from jaxserve.grammars.verdicts import Tokens, TryGrammar, Verdict
from jaxserve.isolation.engine_process import EngineProcess
from jaxserve.isolation.launch import Listener
from jaxserve.messages import Action, Control
from jaxserve.structured_outputs_params import FIELD

logger = logging.getLogger(__name__)

MODULE = "jaxserve.grammars.child"
MOST_TRIALS = 2  # at once
MOST_TRIES = 2  # of a text, where the process dies
MOST_VERDICTS = 4096  # that are kept
CLOSE_S = 1.0  # that the process gets to end when it is told to
RETRY_S = 1.0  # after which a request may come again

# what a grammar is not; None: it compiles
Allowed = str | None


@dataclass(slots=True, eq=False)
class _Asked:
    """A text that has no verdict yet, and for whom it is tried."""

    key: bytes
    text: str
    client: str
    futures: list[Future[Allowed]] = field(default_factory=list)
    tries: int = 0


class GrammarChecks:
    """Has grammars tried; used by several threads.

    Clients take turns: one that sends many texts does not keep others waiting.

    Args:
        tokens: what grammars are for; asked for when the process is started, in a thread.
    """

    def __init__(self, tokens: Callable[[], Tokens]):
        self._tokens = tokens
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, Allowed] = OrderedDict()
        self._asked: dict[bytes, _Asked] = {}
        self._waiting: OrderedDict[str, deque[_Asked]] = OrderedDict()  # by client, in turn
        self._tried: dict[int, _Asked] = {}  # by the number of the question
        self._numbers = itertools.count()
        self._process: EngineProcess | None = None
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to start the process, so that the first grammar does not wait for it."""
        with self._lock:
            self._start()

    def submit(self, text: str, client: str = "") -> Future[Allowed]:
        """Ask what a grammar is not; the result is None if it compiles.

        The future raises CompilerBusyError where the process cannot be started or has died, and
        ShutdownError once this is closed. One that is cancelled is not tried.

        Args:
            text: of the grammar, in llguidance's notation.
            client: whose turn it is.
        """
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        future: Future[Allowed] = Future()
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                future.set_result(self._verdicts[key])
                return future
            if self._is_closed:
                future.set_exception(ShutdownError("the engine was shut down"))
                return future
            asked = self._asked.get(key)
            if asked is None:
                asked = self._asked[key] = _Asked(key, text, client)
                self._waiting.setdefault(client, deque()).append(asked)
            asked.futures.append(future)
            self._start()
            self._send_some()
        future.add_done_callback(lambda done: self._dropped(asked, done))
        return future

    def check(self, text: str, name: str, given: Any, client: str = "") -> None:
        """See that a grammar compiles; waits until that is known.

        Args:
            text: as for `submit`.
            name, given: the field that it was made of, for errors.
            client: as for `submit`.

        Raises:
            ValidationError: names the field: the grammar does not compile within the limits.
            CompilerBusyError, ShutdownError: see `submit`.
        """
        allowed = self.submit(text, client).result()
        if allowed is not None:
            raise ValidationError(name, given, allowed)

    def close(self) -> None:
        """End the process; what is not known yet will not be."""
        with self._lock:
            self._is_closed = True
            lost = [*self._asked.values()]
            self._forget_all()
            if self._process is not None:
                self._tell(Control(Action.CLOSE))
            self._wanted.set()
        for one in lost:
            _fail(one, ShutdownError("the engine was shut down"))

    # -- with the lock held ----------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jaxserve-grammars", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _send_some(self) -> None:
        """Have as many texts tried as may be at once."""
        while self._process is not None and self._waiting and len(self._tried) < MOST_TRIALS:
            client, texts = next(iter(self._waiting.items()))
            asked = texts.popleft()
            self._waiting.move_to_end(client)
            if not texts:
                del self._waiting[client]
            asked.tries += 1
            number = next(self._numbers)
            self._tried[number] = asked
            self._tell(TryGrammar(number, asked.text))

    def _tell(self, body: Tokens | TryGrammar | Control) -> None:
        assert self._process is not None
        self._process.send(self._process.outbox.seal(body))

    def _forget_all(self) -> None:
        self._asked.clear()
        self._waiting.clear()
        self._tried.clear()

    # -- from any thread -------------------------------------------------------------------------

    def _dropped(self, asked: _Asked, future: Future[Allowed]) -> None:
        """A text that waits for its turn and that no request needs any more is not tried."""
        if not future.cancelled():
            return
        with self._lock:
            asked.futures.remove(future)
            texts = self._waiting.get(asked.client, deque())
            if not asked.futures and asked in texts:
                texts.remove(asked)
                if not texts:
                    del self._waiting[asked.client]
                del self._asked[asked.key]

    # -- the thread that reads what the process says ---------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._wanted.wait()
            self._wanted.clear()
            try:
                how = self._serve()
            except Exception:  # whatever it is, no request must wait for ever
                logger.exception("the process that tries grammars cannot be used")
                self._lose(MOST_TRIES)
            else:
                if not self._is_closed:
                    logger.error("the process that tries grammars %s", how)
                    self._lose(0)

    def _serve(self) -> str:
        """The life of one process; how it ended. Raises EngineDeadError if it cannot be started."""
        with closing(Listener()) as listener:
            tokens = self._tokens()
            process = EngineProcess(listener, MODULE)
            try:
                with self._lock:
                    self._process = process
                    self._tell(Control(Action.CLOSE) if self._is_closed else tokens)
                    self._send_some()
                while (message := process.receive()) is not None:
                    verdict = process.inbox.open(message)
                    assert isinstance(verdict, Verdict)
                    self._take(verdict)
            finally:
                with self._lock:
                    self._process = None
                how = process.wait(CLOSE_S)
            return how

    def _take(self, verdict: Verdict) -> None:
        with self._lock:
            asked = self._tried.pop(verdict.number, None)
            if asked is not None:
                self._asked.pop(asked.key, None)
                self._verdicts[asked.key] = verdict.allowed
                while len(self._verdicts) > MOST_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._send_some()
            futures = [] if asked is None else [*asked.futures]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_result(verdict.allowed)

    def _lose(self, tries: int) -> None:
        """The process has gone with what it tried.

        Args:
            tries: that what waits has been worth beside its own.
        """
        with self._lock:
            again = [*self._tried.values()]
            self._tried.clear()
            for asked in again:
                self._waiting.setdefault(asked.client, deque()).appendleft(asked)
            lost = [one for one in self._asked.values() if one.tries + tries >= MOST_TRIES]
            for one in lost:
                del self._asked[one.key]
                self._waiting[one.client].remove(one)
                if not self._waiting[one.client]:
                    del self._waiting[one.client]
            if self._asked:
                self._wanted.set()
        for one in lost:
            _fail(one, CompilerBusyError(FIELD, RETRY_S))


def _fail(asked: _Asked, error: Exception) -> None:
    for future in [*asked.futures]:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)

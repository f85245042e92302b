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
from dataclasses import dataclass, field
from typing import Any

from jaxserve.boundary.grammar_verdicts import GrammarTokens, SlowGrammar, TryGrammar, Verdict
from jaxserve.boundary.messages import Action, Body, Control
from jaxserve.errors import CompilerBusyError, ShutdownError, ValidationError
from jaxserve.params.structured_outputs_params import FIELD
from jaxserve.processes.engine_process import EngineProcess

logger = logging.getLogger(__name__)

MODULE = "jaxserve.grammars.trial_process"
MOST_SHORT, MOST_TRIALS = 2, 12  # at once: that have just begun, and in all
MOST_TRIES = 2  # of a text, where the process dies
MOST_VERDICTS = 4096  # that are kept
MAX_KEPT_CHARACTERS = 4 << 20  # of grammars in another notation
CLOSE_S = 1.0  # that the process gets to end when it is told to
ENDED = "the server is stopping: it compiles no other constraint"
RETRY_S = 1.0  # after which a request may come again


@dataclass(slots=True, eq=False)
class _Request:
    """What waits for a verdict, and of what the text was made."""

    text: str
    name: str
    given: Any
    future: Future[str] = field(default_factory=Future)

    def judge(self, verdict: Verdict) -> None:
        if verdict.allowed is not None:
            self.fail(ValidationError(self.name, self.given, verdict.allowed))
        elif self.future.set_running_or_notify_cancel():
            self.future.set_result(self.text if verdict.notation is None else verdict.notation)

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Asked:
    """A text that has no verdict yet, and for whom it is tried."""

    key: bytes
    text: str
    client: str
    requests: list[_Request] = field(default_factory=list)
    tries: int = 0


class GrammarChecks:
    """Has grammars tried; used by several threads.

    Clients take turns: one that sends many texts does not keep others waiting.

    Args:
        tokens: what grammars are for; asked for when the process is started, in a thread.
    """

    def __init__(self, tokens: Callable[[], GrammarTokens]):
        self._tokens = tokens
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._kept_characters = 0
        self._asked: dict[bytes, _Asked] = {}
        self._waiting: OrderedDict[str, deque[_Asked]] = OrderedDict()  # by client, in turn
        self._tried: dict[int, _Asked] = {}  # by the number of the question
        self._short: set[int] = set()  # those that have just begun
        self._numbers = itertools.count()
        self._process: EngineProcess | None = None
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to start the process, so that the first grammar does not wait for it."""
        with self._lock:
            self._start()

    def submit(self, text: str, name: str, given: Any, client: str = "") -> Future[str]:
        """Have a grammar tried; the result is the text that compiles, in llguidance's notation.

        The future raises ValidationError, which names the field, where the grammar does not compile
        within the limits, CompilerBusyError where the process cannot be started or has died, and
        ShutdownError once this is closed. What is cancelled is not tried.

        Args:
            text: of the grammar, as `grammar_text` gave it.
            name, given: the field that it was made of, for errors.
            client: whose turn it is.
        """
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        request = _Request(text, name, given)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                request.judge(self._verdicts[key])
                return request.future
            if self._is_closed:
                request.fail(ShutdownError(ENDED))
                return request.future
            asked = self._asked.get(key)
            if asked is None:
                asked = self._asked[key] = _Asked(key, text, client)
                self._waiting.setdefault(client, deque()).append(asked)
            asked.requests.append(request)
            self._start()
            self._send_some()
        request.future.add_done_callback(lambda _: self._dropped(asked, request))
        return request.future

    def drain(self) -> None:
        """Have nothing wait behind as many texts as may be tried at once, which take long."""
        with self._lock:
            if len(self._tried) < MOST_TRIALS:
                return
            lost = [one for texts in self._waiting.values() for one in texts]
            self._waiting.clear()
            for one in lost:
                del self._asked[one.key]
        for one in lost:
            _fail(one, ShutdownError(ENDED))

    def close(self) -> None:
        """End the process; what is not known yet will not be."""
        with self._lock:
            self._is_closed = True
            lost = [*self._asked.values()]
            for kept in (self._asked, self._waiting, self._tried, self._short):
                kept.clear()
            if self._process is not None:
                self._tell(Control(Action.CLOSE))
            self._wanted.set()
        for one in lost:
            _fail(one, ShutdownError(ENDED))

    # -- with the lock held ----------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jaxserve-grammars", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _send_some(self) -> None:
        """Have as many texts tried as may be at once."""
        while (
            self._process is not None
            and self._waiting
            and len(self._short) < MOST_SHORT
            and len(self._tried) < MOST_TRIALS
        ):
            client, texts = next(iter(self._waiting.items()))
            asked = texts.popleft()
            self._waiting.move_to_end(client)
            if not texts:
                del self._waiting[client]
            asked.tries += 1
            number = next(self._numbers)
            self._tried[number] = asked
            self._short.add(number)
            self._tell(TryGrammar(number, asked.text))

    def _tell(self, body: GrammarTokens | TryGrammar | Control) -> None:
        assert self._process is not None
        self._process.send(body)

    def _judge(self, verdict: Verdict) -> list[_Request]:
        """Keep a verdict; the requests that wait for it."""
        asked = self._tried.pop(verdict.number, None)
        if asked is None:
            return []  # it was closed meanwhile
        del self._asked[asked.key]
        if not verdict.is_late:
            self._verdicts[asked.key] = verdict
            self._kept_characters += len(verdict.notation or "")
            while (
                len(self._verdicts) > MOST_VERDICTS or self._kept_characters > MAX_KEPT_CHARACTERS
            ):
                _, oldest = self._verdicts.popitem(last=False)
                self._kept_characters -= len(oldest.notation or "")
        return [*asked.requests]

    def _take_out(self, asked: _Asked) -> None:
        """A text that waits for its turn is not tried."""
        texts = self._waiting[asked.client]
        texts.remove(asked)
        if not texts:
            del self._waiting[asked.client]
        del self._asked[asked.key]

    # -- from any thread -------------------------------------------------------------------------

    def _dropped(self, asked: _Asked, request: _Request) -> None:
        """A text that waits for its turn and that no request needs any more is not tried."""
        if not request.future.cancelled():
            return
        with self._lock:
            asked.requests.remove(request)
            if not asked.requests and asked in self._waiting.get(asked.client, ()):
                self._take_out(asked)

    # -- the thread that reads what the process says ---------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_closed:
                return
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
        tokens = self._tokens()
        process = EngineProcess(MODULE)
        try:
            with self._lock:
                self._process = process
                self._tell(Control(Action.CLOSE) if self._is_closed else tokens)
                self._send_some()
            while (body := process.receive()) is not None:
                self._take(body)
        finally:
            with self._lock:
                self._process = None
            how = process.wait(CLOSE_S)
        return how

    def _take(self, body: Body) -> None:
        with self._lock:
            assert isinstance(body, SlowGrammar | Verdict)
            self._short.discard(body.number)
            requests = self._judge(body) if isinstance(body, Verdict) else []
            self._send_some()
        for request in requests:
            assert isinstance(body, Verdict)
            request.judge(body)
        if isinstance(body, Verdict) and body.note and requests:
            logger.warning("%s: %s", requests[0].name, body.note)

    def _lose(self, tries: int) -> None:
        """The process has gone with what it tried.

        Args:
            tries: that what waits has been worth beside its own.
        """
        with self._lock:
            again = [*self._tried.values()]
            self._tried.clear()
            self._short.clear()
            for asked in again:
                self._waiting.setdefault(asked.client, deque()).appendleft(asked)
            lost = [one for one in self._asked.values() if one.tries + tries >= MOST_TRIES]
            for one in lost:
                self._take_out(one)
            if self._asked:
                self._wanted.set()
        for one in lost:
            _fail(one, CompilerBusyError(FIELD, RETRY_S))


def _fail(asked: _Asked, error: Exception) -> None:
    for request in [*asked.requests]:
        request.fail(error)

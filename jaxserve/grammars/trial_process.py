"""The process that tries grammars: `python -m jaxserve.grammars.trial_process DESCRIPTOR`.

It loads the tokens once and has each grammar compiled by a fork of itself (`trial.py`), so it has
one thread and never compiles anything. It ends when it is told to or when the other side has gone,
and its forks with it.
"""

from __future__ import annotations

import gc
import math
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from jaxserve.boundary.grammar_verdicts import GrammarTokens, SlowGrammar, TryGrammar, Verdict
from jaxserve.boundary.messages import Body
from jaxserve.grammars.matchers import GrammarError, token_table
from jaxserve.grammars.trial import Trial
from jaxserve.processes.launch import stream_of
from jaxserve.processes.oom_score import offer_to_oom_killer
from jaxserve.processes.wire import Channel

# Of 1000: where memory runs out, the kernel ends a fork of this process, then this process or the
# engine's, and not the server.
OOM_SCORE = 900


class Trials:
    """The grammars that are being tried.

    Args:
        channel: where questions come from and answers go to.
        stream: its socket.
    """

    def __init__(self, channel: Channel, stream: socket.socket):
        self._channel = channel
        self._table: Any = None
        self._wrong: str | None = None  # why no grammar compiles
        self._running: dict[int, tuple[int, Trial]] = {}  # with their numbers, by descriptor
        self._selector = selectors.DefaultSelector()
        self._stream = stream.fileno()
        self._selector.register(stream, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until the other side says that it is over; raises EOFError if it has gone."""
        try:
            while True:
                for key, _ in self._selector.select(self._wait()):
                    if key.fd == self._stream:
                        for body in self._channel.arrived():
                            if not self._take(body):
                                return
                    elif not self._running[key.fd][1].read():
                        self._ended(key.fd)
                self._pass_time()
        finally:
            for _, trial in self._running.values():
                trial.kill()
                trial.close()

    def _wait(self) -> float | None:
        if not self._running:
            return None
        due = min(trial.due for _, trial in self._running.values())
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _pass_time(self) -> None:
        now = time.monotonic()
        for number, trial in self._running.values():
            if trial.due <= now:
                was_long = trial.is_long
                trial.pass_time()
                if not was_long:
                    self._say(SlowGrammar(number))

    def _take(self, body: Body) -> bool:
        match body:
            case GrammarTokens():
                try:
                    self._table = token_table(body)
                except GrammarError as error:
                    self._wrong = str(error)
                gc.collect()
                gc.freeze()  # a collection in a fork would copy what it shares
            case TryGrammar(number, text) if self._wrong is None:
                trial = Trial(self._table, text)
                self._running[trial.reader] = number, trial
                self._selector.register(trial.reader, selectors.EVENT_READ)
            case TryGrammar(number):
                self._say(Verdict(number, self._wrong))
            case _:
                return False
        return True

    def _ended(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        number, trial = self._running.pop(descriptor)
        allowed = trial.close()
        self._say(Verdict(number, allowed, trial.is_late, trial.notation, trial.note))

    def _say(self, body: SlowGrammar | Verdict) -> None:
        self._channel.send(body)


def main(arguments: list[str]) -> int:
    """Serve the process at the other end of a socket; returns the exit code."""
    # a signal to the whole group is for the server, which lets requests finish
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    offer_to_oom_killer(OOM_SCORE)
    stream = stream_of(arguments[0])
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the server has gone
        Trials(Channel(stream), stream).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

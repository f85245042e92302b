"""One process with an engine: started, spoken to, killed."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import threading

from jaxserve.boundary.messages import Body
from jaxserve.errors import MessageError
from jaxserve.processes.launch import ANYWHERE, EarlyProcess, Place
from jaxserve.processes.wire import Channel

logger = logging.getLogger(__name__)


class EngineProcess:
    """A running process; messages go to it from one thread at a time, and one reads what it says.

    It imports what it needs and then waits for its first message.

    Args:
        module: what it runs.
        early: one that has been started already; None: it is started here.
        place: its part of the machine, where it is started here.

    Raises:
        EngineDeadError: it cannot be started.
    """

    def __init__(self, module: str, early: EarlyProcess | None = None, place: Place = ANYWHERE):
        self._process, stream = (early or EarlyProcess(module, place)).take()
        self._channel = Channel(stream)
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="jaxserve-writer", daemon=True)
        self._writer.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, body: Body) -> None:
        """Hand over a message; one to a process that has died is lost.

        Raises:
            MessageError: it cannot be written.
        """
        self._sent.put(self._channel.frame(body))

    def receive(self) -> Body | None:
        """What it says next; None once it has ended, whatever was left half said."""
        try:
            return self._channel.receive()
        except MessageError:
            logger.exception("the engine's process says what is no message; it is killed")
            self.kill()
            return None

    def kill(self) -> None:
        """End it whatever it does, also while it is stopped by a signal."""
        self._process.kill()

    def wait(self, seconds: float) -> str:
        """How it ended, in words; one that does not within some time is killed."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._sent.put(None)
        self._channel.close()
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"

    def _write(self) -> None:
        while (frame := self._sent.get()) is not None:
            try:
                self._channel.send_frame(frame)
            except OSError:
                return  # it has died, and its reader knows

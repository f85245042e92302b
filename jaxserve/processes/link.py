"""A connection between two processes of one engine, which notices when the other one is lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from jaxserve.boundary.messages import Body, Control
from jaxserve.boundary.process_messages import Beat
from jaxserve.errors import EngineDeadError, MessageError
from jaxserve.liveness.pulse import BEAT_S, Pulse
from jaxserve.processes.wire import Channel, StartRefusal

BEATS = 4  # of a pulse, from one sign of life to the next
LOST_S = 8.0  # of silence: the other process is lost


class Link:
    """Messages go out from any thread, and one thread takes those that come in.

    A process is lost when its connection ends without a `Control` that said so, when it says that
    it cannot go on (`StartRefusal`), or when nothing was heard of it for LOST_S. The silence does
    not count the seconds in which this process was stopped itself.

    Args:
        channel: the connection; both sides have said who they are.
        name: of the other process, for errors.
        on_lost: called once, in a thread of the link, with what has happened in words; not after
            `close`.
    """

    def __init__(self, channel: Channel, name: str, on_lost: Callable[[str], None]):
        self._channel, self._name, self._on_lost = channel, name, on_lost
        self._arrived: queue.SimpleQueue[Body | None] = queue.SimpleQueue()
        self._writing, self._ending = threading.Lock(), threading.Lock()
        self._lost: str | None = None
        self._silence = 0.0
        self._ended = threading.Event()
        for work in (self._read, self._watch):
            threading.Thread(target=work, name="jaxserve-link", daemon=True).start()

    def send(self, body: Body) -> None:
        """Hand over a message.

        Raises:
            EngineDeadError: the other process is lost.
        """
        try:
            with self._writing:
                self._channel.send(body)
        except OSError as error:
            self._lose(f"{self._name} was lost: {error}")
            raise EngineDeadError(str(self._lost)) from error

    def receive(self) -> Body:
        """The next message, which is waited for.

        Raises:
            EngineDeadError: the other process is lost, or the link is closed.
        """
        body = self._arrived.get()
        if body is None:
            self._arrived.put(None)
            raise EngineDeadError(self._lost or f"the link to {self._name} is closed")
        return body

    def close(self) -> None:
        """End the connection; the other side reads to the end."""
        self._end(None)

    def _read(self) -> None:
        try:
            while (body := self._channel.receive()) is not None:
                self._silence = 0.0
                if isinstance(body, StartRefusal):
                    return self._lose(f"{self._name}: {body.text}")
                if not isinstance(body, Beat):
                    self._arrived.put(body)
                if isinstance(body, Control):  # the last message: what ends now is not lost
                    self._end(None)
                    return
            self._lose(f"{self._name} was lost: its connection has ended")
        except (MessageError, OSError) as error:
            self._lose(f"{self._name} was lost: {error}")

    def _watch(self) -> None:
        pulse, count = Pulse(), 0
        while not self._ended.wait(BEAT_S):
            self._silence += pulse.beat()
            if self._silence > LOST_S:
                return self._lose(f"{self._name} was lost: it was silent for {LOST_S:.0f} s")
            count += 1
            # while a message is being written, that one is the sign of life
            if count % BEATS == 0 and self._writing.acquire(blocking=False):
                try:
                    self._channel.send(Beat())
                except OSError as error:
                    return self._lose(f"{self._name} was lost: {error}")
                finally:
                    self._writing.release()

    def _lose(self, why: str) -> None:
        if self._end(why):
            self._on_lost(why)

    def _end(self, why: str | None) -> bool:
        """Whether this call is the one that ended it."""
        with self._ending:
            if self._ended.is_set():
                return False
            self._lost = why
            self._ended.set()
        self._arrived.put(None)
        self._channel.close()
        return True

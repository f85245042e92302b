"""One client's connection: uvicorn's, with our error body and bounds on what a client may hold."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr

from jaxserve.scheduling.ledger import Entry
from server.admission import Admission, BusyResponse
from server.client_limits import Limits
from server.counts import Cell, Counts
from server.descriptors import Descriptors
from server.errors import ApiError
from server.old_http import end_with_connection
from server.peer import PeerWatch
from server.raw_answer import raw_answer, raw_error

MAX_HEAD_BYTES = 2**16  # request line and headers; and of trailers
# Each takes 134 bytes or more: a head of short ones would be 17 times as large in memory.
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 60.0
# For the rest of a request that has been answered already, which is dropped: where a connection is
# closed while its client still sends, the client gets a reset in place of its answer.
LINGER_S = 5.0
MAX_PIPELINED = 16  # requests that wait behind the one being answered
MIN_IDLE_S = 1.0  # a younger one may have sent a request that is not read yet
TOO_MANY = "too many connections are open; try again later"
HEALTH_PATHS = frozenset({"/health", "/ping"})

logger = logging.getLogger("jaxserve.server")


class Connection(HttpToolsProtocol):
    """Refuses what is no HTTP (400), a head too long (431) and one that does not end (408).

    A refusal is the last answer of a connection, behind those to the requests before it.

    Where too many are open, one that has no request makes room for a new one. If all have one, the
    new one may ask for the server's health alone (503). A client that does not read is cut off. One
    that has ended its side of the connection gets its answers, unless it is gone.

    Attributes:
        limits: of the server.
        admission: refuses requests whose bodies need not be read; None lets all in.
        descriptors: what there is for connections.
        counts: of the server, whose connections may be in several processes.
        idle: those of the server without a whole request, and since when; the longest first.
        idle_extra: and of those that may ask for its health alone.
    """

    limits: ClassVar[Limits] = Limits()
    admission: ClassVar[Admission | None] = None
    descriptors: ClassVar[Descriptors] = Descriptors()
    counts: ClassVar[Counts] = Counts()
    idle: ClassVar[dict[Connection, float]] = {}
    idle_extra: ClassVar[dict[Connection, float]] = {}

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head_bytes: int | None = 0  # None while a body is read
        self._trailer_bytes = 0
        self._head_has_begun = False
        self._is_complete = False  # the newest request has come to its end
        self._is_extra = False
        self._is_refused = False  # the request whose body comes
        self._last: bytes | None = None  # that is written behind the answers to come
        self._is_over = False  # the last is written: what comes is dropped
        self._dropped = 0  # bytes of a request that is answered
        self._entry: Entry | None = None  # of the request being answered
        self._cycles: list[RequestResponseCycle] = []  # that are not answered, the oldest first
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._watch: PeerWatch
        self._has_ended = False  # the client its side

    @classmethod
    def limited(
        cls,
        limits: Limits,
        admission: Admission | None = None,
        descriptors: Descriptors = Descriptors(),  # noqa: B008
        counts: Counts | None = None,
    ) -> type[Connection]:
        """The connections of one server."""
        own: dict[str, Any] = {"limits": limits, "admission": admission, "descriptors": descriptors}
        own |= {"counts": counts or Counts(), "idle": {}, "idle_extra": {}}
        return type("Connection", (cls,), own)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        interval = self.limits.keep_alive_interval
        told, begins = self._passes_over_probes, self._begins_to_answer
        self._watch = PeerWatch(transport, interval, self._is_unwatched, told, begins)
        self._await_head()
        number = transport.get_extra_info("socket").fileno()
        self.counts.put(Cell.CONNECTIONS, len(self.connections))
        excess = int(self.counts.total(Cell.CONNECTIONS)) - self.limits.max_connections
        excess = max(excess, self.descriptors.excess(number))
        while excess > 0 and self.idle:
            oldest, since = next(iter(self.idle.items()))
            if self.loop.time() - since < MIN_IDLE_S:
                break
            oldest.make_room()
            excess -= 1
        if excess > 0:
            logger.warning("too many connections are open: %d", len(self.connections))
        if excess > self.descriptors.extra + self.descriptors.leaving:
            self.transport.write(self._error(503, TOO_MANY))
            self.make_room()
            return
        if excess > 0 and len(self.idle_extra) >= self.descriptors.extra:
            next(iter(self.idle_extra)).make_room()
        self._is_extra = excess > 0
        self._is_idle_from_now()

    def make_room(self) -> None:
        """Close: another client wants to come in, and this one has no request."""
        self._is_not_idle()
        self.transport.close()
        self._cut_off_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_not_idle()
        self._leave()
        self._head_is_over()
        self._watch.stop()
        if self._write_timer is not None:
            self._write_timer.cancel()
        for cycle in self._cycles:  # uvicorn tells the newest alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.counts.put(Cell.CONNECTIONS, len(self.connections))

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._drop(len(data))
            return
        if self._last is not None:
            self.flow.pause_reading()  # uvicorn goes on with each answer
            return
        if self._head_bytes is not None:
            if not self._head_bytes:
                self._await_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to go on: the client has ended its side, and perhaps waits for its answers."""
        is_whole = self._is_complete or self._last is not None
        if not self._cycles or not is_whole or not self._watch.can_probe():
            return False
        if self._last is None:
            self.cycle.keep_alive = False
        self._has_ended = True
        self._watch.look()
        return not self.transport.is_closing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_refused = False
        self._is_complete, self._trailer_bytes, self._dropped = False, 0, 0
        if self._head_bytes is None:
            self._head_bytes = 0
        self._head_has_begun = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_bytes is not None:
            if len(self.headers) >= MAX_HEADERS:
                self._refuse(431, f"there are more than {MAX_HEADERS} headers")
                raise HttpParserError("too many headers")
            super().on_header(name, value)
            return
        # behind a chunked body: of no use
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"trailers are longer than {MAX_HEAD_BYTES} bytes")
            raise HttpParserError("the trailers are too long")

    def on_headers_complete(self) -> None:
        if self._is_over:
            raise HttpParserError("the last answer is written")
        self._head_is_over()
        if self._cycles:
            self._is_not_idle()
        else:
            self._is_idle_from_now()  # without its body a request makes room for others
        # of the bytes received, some may be the body's or the next request's
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse_long_head()
            raise HttpParserError("the head is too long")  # what follows is not parsed
        if self._is_extra and self.url.partition(b"?")[0].decode("latin-1") not in HEALTH_PATHS:
            self._refuse(503, TOO_MANY)
            raise HttpParserError("too many connections")
        for name, value in self.headers:
            if (
                name == b"upgrade"
                and value.lower() == b"websocket"
                and self.parser.should_upgrade()
            ):
                self._refuse(400, "this server speaks no websockets")
                self._is_refused = True
                return
            if name == b"expect" and value.lower() != b"100-continue":
                self._refuse(417, "of Expect the server knows 100-continue alone")
                raise HttpParserError("an expectation that is not known")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(400, f"more than {MAX_PIPELINED} requests before the first answer")
            raise HttpParserError("too many requests")
        # a client that does not read is not told more
        if self.admission is not None and not self._cycles and not self.flow.write_paused:
            address = self.client[0] if self.client else ""
            told = self.admission.look(self.parser.get_method(), self.url, self.headers, address)
            if isinstance(told, BusyResponse):
                self._refuse_early(*told)
                return
            if told is not None:
                self._entry = self.scope["state"]["entry"] = told
        self.scope["state"]["transport"] = self.transport  # by which it is known what is unread
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            end_with_connection(self.cycle)
        if self._is_extra:
            self.cycle.keep_alive = False
        if self.pipeline and not self._watch.is_on:
            self._watch.look()

    def on_body(self, body: bytes) -> None:
        if self._is_refused or self.cycle.response_complete:
            self._drop(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            self._is_complete = True
            if not (self._is_over or self._last is not None or self.transport.is_closing()):
                self._become_idle()
            return
        if self._entry is not None and len(self._cycles) == 1:
            self._entry.arrive()
        super().on_message_complete()
        self._is_not_idle()
        self._is_complete = True
        if self.cycle is not None and self.cycle.response_complete:
            self._become_idle()  # it was answered before it was complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._leave()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.transport.is_closing():
            self._cut_off_later()
        elif self._last is not None:
            if not self._cycles:
                self._end_with(self._last)
        elif self.cycle.response_complete:  # no other request has come
            if self._is_complete:
                self._become_idle()
            else:
                self._linger()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_off_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut_off_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: uvicorn would ask for a package to be installed."""

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser gives up."""
        self._refuse(400, msg)

    def _refuse_early(self, head: bytes, body: bytes) -> None:
        """Answer now; the connection goes on, or ends, as it would behind any answer."""
        self._is_refused = True
        self.server_state.total_requests += 1
        version = self.parser.get_http_version()
        keep = version != "1.0" and self.parser.should_keep_alive() and not self._is_extra
        answer = raw_answer(503, self.server_state.default_headers, head, body, ends=not keep)
        if self.access_log:
            url = self.url.decode("latin-1")
            told = (get_client_addr(self.scope), "POST", url, version, 503)
            self.access_logger.info('%s - "%s %s HTTP/%s" %d', *told)
        if keep:
            self.transport.write(answer)
            self._linger()
        else:
            self._end_with(answer)

    def _leave(self) -> None:
        if self._entry is not None:
            self._entry.leave()
            self._entry = None

    def _keep_for_a_while(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _become_idle(self) -> None:
        self._head_is_over()
        self._head_bytes, self._head_has_begun = 0, False
        self._keep_for_a_while()
        self._is_idle_from_now()

    def _is_idle_from_now(self) -> None:
        self._is_not_idle()  # the dictionaries are in the order of the times
        idle = self.idle_extra if self._is_extra else self.idle
        idle[self] = self.loop.time()

    def _is_not_idle(self) -> None:
        self.idle.pop(self, None)
        self.idle_extra.pop(self, None)

    def _cut_off_later(self) -> None:
        """End the connection by force where the client does not read what is left for it."""
        if self._write_timer is None:
            timeout = self.limits.write_timeout
            self._write_timer = self.loop.call_later(timeout, self.transport.abort)

    def _is_unwatched(self) -> bool:
        """Whether nothing is read that would tell that the client is gone."""
        return not self._is_over and bool(
            self.pipeline or self._has_ended or self._last is not None
        )

    def _passes_over_probes(self) -> bool:
        oldest = self._cycles[0].scope["http_version"] if self._cycles else ""
        return self.scheme == "http" and oldest == "1.1"

    def _begins_to_answer(self) -> bool:
        return not self._cycles[0].response_started and not self.flow.write_paused

    def _await_head(self) -> None:
        """Wait for the end of a head, of which something has come, or for a new connection's."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._head_has_begun:
            self._refuse(408, f"the headers did not arrive in {HEAD_TIMEOUT_S:.0f} s")
        else:
            self.make_room()  # nothing was asked: nothing is answered

    def _head_is_over(self) -> None:
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_long_head(self) -> None:
        self._refuse(431, f"request line and headers are longer than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what has come last with an error, in its turn, and end the connection."""
        self._head_is_over()
        if self._is_over or self._last is not None or self.transport.is_closing():
            return
        last = self._error(status, message)
        if not self._is_complete:
            if self._is_refused:
                last = b""  # it has its answer
            elif self.cycle is not None and self.cycle.scope is self.scope:  # it is the body
                if self.cycle.response_started:
                    last = b""
                else:
                    self._forget_newest()
        if not self._cycles:
            self._end_with(last)
            return
        self._last = last
        self.flow.pause_reading()
        self._watch.look()

    def _forget_newest(self) -> None:
        """The newest request is not answered by the application any more."""
        cycle = self._cycles.pop()
        if self.pipeline:
            self.pipeline.popleft()
            return
        cycle.disconnected, cycle.waiting_for_100_continue = True, False
        cycle.message_event.set()
        self._leave()

    def _error(self, status: int, message: str) -> bytes:
        error = ApiError(status, message, headers={"retry-after": "1"} if status == 503 else {})
        return raw_error(error, self.server_state.default_headers)

    def _end_with(self, last: bytes) -> None:
        """Write the last bytes and end this side; then drop what still comes, for a while."""
        self._is_over, self._last = True, None
        self._unset_keepalive_if_required()
        self.transport.write(last)
        # TLS lingers by itself
        if self._has_ended or not self.transport.can_write_eof():
            self.make_room()
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client has reset the connection
            self.transport.abort()
            return
        self.flow.resume_reading()
        self._linger()

    def _linger(self) -> None:
        self._head_is_over()
        self._head_timer = self.loop.call_later(LINGER_S, self.make_room)

    def _drop(self, num_bytes: int) -> None:
        self._dropped += num_bytes
        if self._dropped > self.limits.max_body_bytes:
            self.make_room()

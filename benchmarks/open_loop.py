"""Requests sent when they are due, whether or not answers come back, by one cheap process.

Raw sockets and one poll: a client that shares its cores with the server it asks must cost less than
what it measures.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

RECEIVE_BYTES = 1 << 16
BURST = 32  # requests begun before answers are looked at
MOST_RETRIES = 1  # of a kept connection that the server has closed before anything was answered


@dataclass(slots=True)
class Exchange:
    """One request and its result; times in seconds of the monotonic clock.

    Attributes:
        index: number of the request.
        due: when it was to be sent.
        begun: when the generator came to it: a kept connection was taken, or one opened.
        sent: when its connection was there and its bytes were handed over; 0: never.
        ended: when its answer was complete, or it had failed.
        status: of the answer; 0: there was none.
        error: why not.
    """

    index: int
    due: float
    begun: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    head: bytes = b""
    body: bytes = b""
    error: str = ""

    @property
    def since_due(self) -> float:
        """Seconds from when it was due, what the generator was late included."""
        return self.ended - self.due

    @property
    def since_begun(self) -> float:
        """Seconds from when its connection was taken or opened."""
        return self.ended - self.begun


@dataclass(slots=True)
class _Connection:
    stream: socket.socket
    exchange: Exchange | None
    is_open: bool = False
    retries: int = 0
    received: bytes = b""
    end: int = -1  # of the answer, once its head is there


@dataclass
class Report:
    """The results of one run.

    Attributes:
        exchanges: one a request, in their order.
        begin: when time 0 of the requests was.
        pause: the longest time between two looks for answers, seconds.
        opened: connections.
    """

    exchanges: list[Exchange]
    begin: float
    pause: float = 0.0
    opened: int = 0


class OpenLoop:
    """Sends requests at their times over connections that are kept, as many as are needed.

    Args:
        port: on 127.0.0.1.
        requests: bytes of requests, which are sent in turn.
    """

    def __init__(self, port: int, requests: Sequence[bytes]):
        self._address = "127.0.0.1", port
        self._requests = requests
        self._poll = select.epoll()
        self._busy: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []

    def run(self, times: Sequence[float], patience: float) -> Report:
        """Send a request at each of these seconds from now; wait for answers so long afterwards."""
        begin = time.monotonic()
        report = Report([Exchange(index, begin + at) for index, at in enumerate(times)], begin)
        end = begin + times[-1] + patience
        waiting, looked = 0, begin
        while (now := time.monotonic()) < end and (waiting < len(times) or self._busy):
            report.pause = max(report.pause, now - looked)
            looked = now
            for exchange in report.exchanges[waiting : waiting + BURST]:
                if exchange.due > now:
                    break
                waiting += 1
                self._begin(exchange, report)
            rest = end - now
            if waiting < len(times):
                rest = report.exchanges[waiting].due - time.monotonic()
            for number, _ in self._poll.poll(max(0.0, rest)):
                self._look(self._busy[number], report)
        for connection in list(self._busy.values()):
            self._fail(connection, "no answer in time")
        for connection in self._idle:
            connection.stream.close()
        self._poll.close()
        return report

    def _begin(self, exchange: Exchange, report: Report) -> None:
        exchange.begun = time.monotonic()
        while self._idle:
            kept = self._idle.pop()
            if _is_closed(kept.stream):
                kept.stream.close()
                continue
            kept.exchange, kept.retries, kept.received, kept.end = exchange, MOST_RETRIES, b"", -1
            self._busy[kept.stream.fileno()] = kept
            self._poll.register(kept.stream, select.EPOLLIN)
            self._send(kept, report)
            return
        self._open(exchange, report)

    def _open(self, exchange: Exchange, report: Report) -> None:
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(stream, exchange)
        self._busy[stream.fileno()] = connection
        report.opened += 1
        failed = stream.connect_ex(self._address)
        if failed not in (0, errno.EINPROGRESS):
            self._poll.register(stream, 0)
            self._fail(connection, f"connect: {errno.errorcode[failed]}")
            return
        self._poll.register(stream, select.EPOLLOUT)

    def _send(self, connection: _Connection, report: Report) -> None:
        exchange = connection.exchange
        assert exchange is not None
        exchange.sent = time.monotonic()
        data = self._requests[exchange.index % len(self._requests)]
        try:
            if connection.stream.send(data) < len(data):
                self._fail(connection, "the request did not fit into the socket")
        except OSError as error:
            self._lost(connection, f"send: {_name(error)}", report)

    def _look(self, connection: _Connection, report: Report) -> None:
        if not connection.is_open:
            self._connected(connection, report)
            return
        try:
            data = connection.stream.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(connection, f"receive: {_name(error)}", report)
            return
        if not data:
            self._lost(connection, "closed by the server", report)
            return
        connection.received += data
        self._parse(connection)

    def _connected(self, connection: _Connection, report: Report) -> None:
        failed = connection.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            self._fail(connection, f"connect: {errno.errorcode[failed]}")
            return
        connection.is_open = True
        self._poll.modify(connection.stream, select.EPOLLIN)
        self._send(connection, report)

    def _parse(self, connection: _Connection) -> None:
        received, exchange = connection.received, connection.exchange
        assert exchange is not None
        if connection.end < 0:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return
            exchange.head = received[: head + 2].lower()
            length = exchange.head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            connection.end = head + 4 + int(length)
        if len(received) < connection.end:
            return
        exchange.status = int(received[9:12])
        exchange.body = received[len(exchange.head) + 2 : connection.end]
        exchange.ended = time.monotonic()
        stays = b"connection: close\r\n" not in exchange.head
        self._leave(connection, stays=stays)

    def _lost(self, connection: _Connection, error: str, report: Report) -> None:
        """It is closed: one that was kept may have been closed before the request came."""
        exchange = connection.exchange
        assert exchange is not None
        if connection.retries and not connection.received:
            self._leave(connection, stays=False)
            self._open(exchange, report)
            return
        self._fail(connection, f"{error} after {len(connection.received)} bytes")

    def _fail(self, connection: _Connection, error: str) -> None:
        exchange = connection.exchange
        assert exchange is not None
        exchange.error, exchange.ended = error, time.monotonic()
        self._leave(connection, stays=False)

    def _leave(self, connection: _Connection, *, stays: bool) -> None:
        del self._busy[connection.stream.fileno()]
        self._poll.unregister(connection.stream)
        connection.exchange = None
        if stays:
            self._idle.append(connection)
        else:
            connection.stream.close()


def _is_closed(stream: socket.socket) -> bool:
    try:
        stream.recv(1)  # its end, or bytes without a request
    except BlockingIOError:
        return False
    except OSError:  # reset by the server: no less closed
        return True
    return True


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))

"""A generator that sends when it is time, whatever the server does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.open_loop import OpenLoop

REQUESTS = [b"POST /0 HTTP/1.1\r\n\r\n", b"POST /1 HTTP/1.1\r\n\r\n"]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"

Serve = Callable[[socket.socket, bytes], bool]  # whether the connection stays


@contextmanager
def serving(serve: Serve) -> Iterator[int]:
    """The port of a server with a thread a connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(client: socket.socket) -> None:
        with client:
            while (data := client.recv(1000)) and serve(client, data):
                pass

    def accept() -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=talk, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_requests_go_in_turn_over_connections_that_are_kept() -> None:
    def serve(client: socket.socket, data: bytes) -> bool:
        client.sendall(OK[:10])
        time.sleep(0.001)
        client.sendall(OK[10:] + b"n" + data[6:7])
        return True

    with serving(serve) as port:
        report = OpenLoop(port, REQUESTS).run([0.0, 0.1, 0.2, 0.3], 5.0)
    assert report.opened == 1
    for one in report.exchanges:
        assert (one.status, one.body, one.error) == (200, b"n%d" % (one.index % 2), "")
        assert one.due <= one.begun <= one.sent <= one.ended
        assert one.since_due >= one.since_begun > 0


def test_they_are_sent_while_others_wait_for_their_answers() -> None:
    together = threading.Barrier(3, timeout=10)

    def serve(client: socket.socket, data: bytes) -> bool:
        together.wait()
        client.sendall(OK + b"ok")
        return True

    with serving(serve) as port:
        report = OpenLoop(port, REQUESTS).run([0.0, 0.01, 0.02], 10.0)
    assert report.opened == 3 and [one.status for one in report.exchanges] == [200] * 3


def test_each_way_to_fail_has_a_name() -> None:
    def cut(client: socket.socket, data: bytes) -> bool:
        client.sendall(OK)
        return False

    def silent(client: socket.socket, data: bytes) -> bool:
        return True

    for serve, error in ((cut, f"after {len(OK)} bytes"), (silent, "no answer in time")):
        with serving(serve) as port:
            (one,) = OpenLoop(port, REQUESTS).run([0.0], 0.3).exchanges
        assert one.status == 0 and error in one.error
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (one,) = OpenLoop(port, REQUESTS).run([0.0], 5.0).exchanges
    assert one.error == "connect: ECONNREFUSED"


def test_a_kept_connection_that_the_server_closes_costs_no_request() -> None:
    def once(client: socket.socket, data: bytes) -> bool:
        client.sendall(OK + b"ok")
        return False

    with serving(once) as port:
        report = OpenLoop(port, REQUESTS).run([0.0, 0.0001, 0.1], 5.0)
    assert [one.status for one in report.exchanges] == [200] * 3

"""The socket that clients connect to, and how many of them are let in at a time."""

from __future__ import annotations

import socket

BACKLOG = 4096  # connections that wait for the loop; the system's somaxconn may be less
# Of a connection, that the system takes before they can be sent: else it takes megabytes of an
# answer that is not read. Connections have it from their listener.
UNSENT_BYTES = 2**17


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens.

    Raises:
        OSError: the port is taken, or there is no such address.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS have it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return listener


def as_many(listener: socket.socket, count: int) -> list[socket.socket]:
    """A listener as so many descriptors as connections are to be accepted in a turn of the loop.

    uvloop accepts one from each, and a turn is long where much is to be done: others would wait in
    the backlog, where no limit sees them.
    """
    return [listener, *(listener.dup() for _ in range(count - 1))]

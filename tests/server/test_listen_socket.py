"""Connections that come at once are let in at once."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import pytest

from server.descriptors import ACCEPTED_AT_A_TIME
from server.listen_socket import BACKLOG, UNSENT_BYTES, as_many, listen

uvloop = pytest.importorskip("uvloop")


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_many_are_accepted_in_a_turn_of_the_loop(run) -> None:
    turns: list[int] = []  # in which a connection was accepted
    count = 4 * ACCEPTED_AT_A_TIME

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            turns.append(turn)
            transport.close()

    async def main() -> None:
        nonlocal turn
        loop = asyncio.get_running_loop()
        listeners = as_many(listen("127.0.0.1", 0), ACCEPTED_AT_A_TIME)
        servers = [await loop.create_server(Accepted, sock=s, backlog=BACKLOG) for s in listeners]
        clients = [socket.create_connection(listeners[0].getsockname()) for _ in range(count)]
        while len(turns) < count:
            turn += 1
            await asyncio.sleep(0)
        for one in [*servers, *clients, *listeners]:
            one.close()

    turn = 0
    run(main())
    assert max(Counter(turns).values()) >= ACCEPTED_AT_A_TIME
    assert len(set(turns)) <= count / ACCEPTED_AT_A_TIME + 2


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no such bound")
def test_the_system_takes_little_of_what_is_not_read() -> None:
    with listen("127.0.0.1", 0) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        taken = 0
        with accepted, pytest.raises(BlockingIOError):
            accepted.setblocking(False)
            while taken < 2**24:
                taken += accepted.send(b"x" * 2**16)
        assert taken <= 2 * UNSENT_BYTES

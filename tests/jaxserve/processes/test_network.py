"""The address at which process 0 listens for those that know this machine by a name."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from jaxserve.processes.network import get_ip, own_address


def test_a_name_is_waited_for_and_a_loopback_of_the_machines_own_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str | None] = [None, "127.0.1.1", None, "10.0.0.7"]

    def asked(*words: Any, **options: Any) -> list[Any]:
        if (found := answers.pop(0)) is None:
            raise socket.gaierror("not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    assert own_address("localhost", 0.0) == own_address("127.0.0.1", 0.0) == "127.0.0.1"
    assert own_address("::1", 0.0) == "::1"
    monkeypatch.setattr("jaxserve.processes.network.RETRY_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    assert own_address("node003", 1.0) == get_ip(), "as Debian names the machine itself"
    assert own_address("node004", 1.0) == "10.0.0.7"
    answers[:] = [None]
    with pytest.raises(socket.gaierror):
        own_address("node005", -1.0)

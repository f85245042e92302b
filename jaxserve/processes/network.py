"""Ports and addresses of this machine, for scripts that start servers."""

from __future__ import annotations

import socket


def get_open_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def free_port(host: str) -> int:
    """The same of one address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as found:
        return int(found.getsockname()[1])


def get_ip() -> str:
    """The address by which others reach this machine; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(("192.0.2.1", 80))  # no packet is sent
        except OSError:
            return "127.0.0.1"
        return str(found.getsockname()[0])

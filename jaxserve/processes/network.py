"""Ports and addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket
import time

RETRY_S = 0.25


def get_open_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def free_port(host: str = "127.0.0.1") -> int:
    """The same of one address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as found:
        return int(found.getsockname()[1])


def own_address(host: str, seconds: float) -> str:
    """The address at which this machine listens for those that know it as `host`.

    A name may not be known yet, as that of a pod whose service has just been made. Where the
    machine's own table says that its name is 127.0.1.1, as Debian's does, others know it otherwise.

    Args:
        host: a name or an address.
        seconds: to wait for a name.

    Raises:
        OSError: the name is not known.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
            break
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
    is_meant = host in (found, "localhost")
    return get_ip() if ipaddress.ip_address(found).is_loopback and not is_meant else found


def get_ip() -> str:
    """The address by which others reach this machine; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(("192.0.2.1", 80))  # no packet is sent
        except OSError:
            return "127.0.0.1"
        return str(found.getsockname()[0])

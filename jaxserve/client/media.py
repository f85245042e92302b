"""The bytes behind addresses of images that requests give: `data:`, `http:`, `https:`, `file:`.

Only hosts that the operator names are asked, at public addresses alone, so that no request reaches
what the server alone may reach (CWE-918). Redirects are held to the same rules.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from jaxserve.errors import ValidationError

FIELD = "image_url"
MAX_BYTES = 20 << 20  # of an image as it comes
MAX_SECONDS = 10.0  # that it may take to come
MAX_REDIRECTS = 3
BLOCK = 1 << 16
SHOWN = 80  # characters of an address that errors show
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
# addresses that Python counts as global though they may lead to private ones: IPv4 in IPv6 (its
# old form, NAT64, Teredo, 6to4), and the old site-local addresses
TUNNELS = tuple(
    map(ipaddress.ip_network, ("::/96", "64:ff9b::/96", "2001::/32", "2002::/16", "fec0::/10"))
)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public network."""
    found = ipaddress.ip_address(address)
    tunnelled = any(found in network for network in TUNNELS)
    return found.is_global and not found.is_multicast and not tunnelled


class MediaReader:
    """Reads images from where requests say.

    Args:
        domains: hosts that may be asked, in small letters.
        folder: that files may lie in; None: none may.
        may_reach: whether an IP address may be connected to.
    """

    def __init__(
        self,
        domains: Collection[str] = (),
        folder: str | None = None,
        may_reach: Callable[[str], bool] = is_public,
    ):
        self._domains, self._may_reach = frozenset(domains), may_reach
        self._folder = None if folder is None else Path(folder).resolve()

    def read(self, url: str) -> bytes:
        """The bytes, MAX_BYTES at most, in MAX_SECONDS at most.

        Raises:
            ValidationError: an address that is not allowed, or that does not give them so.
        """
        if url[:5].lower() == "data:":
            return _data(url)
        parts = _parsed(url)
        if parts.scheme in PORTS:
            return self._fetched(url, time.monotonic() + MAX_SECONDS)
        if parts.scheme == "file":
            return self._file(url, parts)
        raise _refusal(url, "a data:, http:, https: or file: URL")

    def _file(self, url: str, parts: SplitResult) -> bytes:
        if self._folder is None:
            allowed = "no file: URLs: this server has no --allowed-local-media-path"
            raise _refusal(url, allowed)
        path = Path(unquote(parts.path))
        allowed = "a file in the folder of --allowed-local-media-path"
        try:
            found = path.resolve()
            if parts.netloc or not found.is_relative_to(self._folder) or not found.is_file():
                raise _refusal(url, allowed)
            with open(found, "rb") as file:
                return _checked(url, file.read(MAX_BYTES + 1))
        except ValidationError:
            raise
        except (OSError, ValueError) as error:
            raise _refusal(url, allowed) from error

    def _fetched(self, url: str, deadline: float) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = self._asked(url, deadline)
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found)
            except ValueError as error:
                raise _refusal(url, "an address that redirects to an address") from error
        raise _refusal(url, f"at most {MAX_REDIRECTS} redirects")

    def _asked(self, url: str, deadline: float) -> bytes | str:
        """What an address gives: bytes, or where it sends the client."""
        parts = _parsed(url)
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in PORTS or host not in self._domains:
            allowed = "an address of a host that --allowed-media-domains names"
            raise _refusal(url, allowed)
        port = parts.port or PORTS[parts.scheme]
        try:
            connection, sock = self._connected(url, parts.scheme, host, port, deadline)
            # whatever comes, and however slowly, ends then
            watch = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, [sock])
            watch.daemon = True
            watch.start()
            try:
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
                connection.request("GET", target, headers=headers)
                found = _body(url, connection.getresponse())
                if time.monotonic() >= deadline:  # what was cut off looks as if it had ended
                    raise TimeoutError
                return found
            finally:
                watch.cancel()
                connection.close()
                sock.close()
        except ValidationError:
            raise
        # ValueError: of an address that is not ASCII
        except (OSError, ValueError, http.client.HTTPException) as error:
            late = time.monotonic() >= deadline
            why = f"not within {MAX_SECONDS:g} s" if late else type(error).__name__
            raise _refusal(url, f"an address that gives an image ({why})") from error

    def _connected(
        self, url: str, scheme: str, host: str, port: int, deadline: float
    ) -> tuple[http.client.HTTPConnection, socket.socket]:
        """A connection to an address that was looked at: the name is not looked up again.

        Of https it has shaken no hands yet, for that takes as long as the other side likes.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(one[4][0]) for one in found]
        if not addresses or not all(map(self._may_reach, addresses)):
            raise _refusal(url, "a host with public addresses alone")
        left = max(0.01, deadline - time.monotonic())
        sock = socket.create_connection((addresses[0], port), timeout=left)
        connection = http.client.HTTPConnection(host, port)
        if scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, context=context)
            # it takes the place of the plain socket, which has no connection from here on
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        connection.sock = sock
        return connection, sock


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (looked at for what it raises)
    except ValueError as error:
        raise _refusal(url, "an address such as https://host/name.png") from error
    return parts


def _body(url: str, answer: http.client.HTTPResponse) -> bytes | str:
    target = answer.getheader("Location")
    if answer.status in REDIRECTS and target is not None:
        return target
    if answer.status != 200:
        raise _refusal(url, f"an address that gives an image (it answered {answer.status})")
    found = bytearray()
    while len(found) <= MAX_BYTES and (block := answer.read(BLOCK)):
        found += block
    return _checked(url, bytes(found))


def _data(url: str) -> bytes:
    """Of `data:[kind][;base64],...`."""
    head, comma, body = url.partition(",")
    if not comma:
        raise _refusal(url, "data:image/png;base64,...")
    if len(body) > 4 * MAX_BYTES:
        raise _refusal(url, f"at most {MAX_BYTES} bytes")
    if not head.lower().endswith(";base64"):
        return _checked(url, unquote_to_bytes(body))
    try:
        return _checked(url, base64.b64decode(unquote(body), validate=True))
    except ValidationError:
        raise
    except ValueError as error:
        raise _refusal(url, "data:image/png;base64,... with base64 alone") from error


def _checked(url: str, data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise _refusal(url, f"an image of at most {MAX_BYTES} bytes")
    return data


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        # not SSLSocket's own, after which the reading thread would take ciphertext for the image
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _refusal(url: str, allowed: str) -> ValidationError:
    return ValidationError(FIELD, url[:SHOWN], allowed)

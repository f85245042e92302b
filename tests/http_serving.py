"""Plain HTTP servers of the tests' own, each in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Writes no line a request."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def answering(server: HTTPServer) -> Iterator[int]:
    """The port of a server, which answers within the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

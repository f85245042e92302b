"""What stands in the place of a stream for a request whose text another process makes."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.outputs import RequestOutput

Tell = Callable[[str, RequestOutput | BaseException], None]


class RelayedRequest:
    """Passes on how a request ends.

    Args:
        name: of the request.
        tell: told of its name, and its last output or the error that ends it.
    """

    __slots__ = ("_name", "_tell")

    def __init__(self, name: str, tell: Tell):
        self._name, self._tell = name, tell

    def num_bytes(self) -> int:
        """Nothing waits here."""
        return 0

    def put_nowait(self, item: RequestOutput | BaseException) -> None:
        """Take an output, or the error that ends the request."""
        if isinstance(item, BaseException) or item.finished:
            self._tell(self._name, item)

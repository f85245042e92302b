"""Whose each running request is, where keys tell clients apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from server.keys import Client


class Holders:
    """The clients of live requests; a request without a holder belongs to no client."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    def of(self, request_id: str) -> Client | None:
        """Who holds a request of the engine."""
        return self._clients.get(request_id)

    def hold(self, request_ids: Iterable[str], client: Client | None) -> None:
        """The requests are the client's, until they are released; None: no keys are asked for."""
        if client is not None:
            self._clients.update(dict.fromkeys(request_ids, client))

    def release(self, request_ids: Iterable[str]) -> None:
        """The requests have ended."""
        for one in request_ids:
            self._clients.pop(one, None)

    @contextmanager
    def holding(self, request_ids: Iterable[str], client: Client | None) -> Iterator[None]:
        """Within the block the requests are the client's; None: no keys are asked for."""
        ids = [] if client is None else [*request_ids]
        self.hold(ids, client)
        try:
            yield
        finally:
            self.release(ids)

"""A router that sends requests to replicas in turn: what `PrefixRouter` is compared with."""

from __future__ import annotations

from itertools import count
from typing import Any

from ray.serve.request_router import RequestRouter


class RoundRobinRouter(RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._turns = count()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        ordered = sorted(candidate_replicas, key=lambda one: str(one.replica_id))
        return [[ordered[next(self._turns) % len(ordered)]]]

"""Ray Serve's router of requests, by `Choice`. Ray imports this where a front runs."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.on_ray.choice import NO_PROMPT, Choice, Prompts
from server.on_ray.forwarding import Forwarded


class PrefixRouter(RequestRouter):
    """Sends requests to the replica that has the least to compute before it has served them.

    What it knows is what this front has sent: each front has a router of its own.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Ray with `request_router_kwargs`, of which this knows none."""
        super().initialize_state(**kwargs)
        self._choice = Choice[ReplicaID]()
        self._prompts = Prompts()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Called by Ray: replicas in the order in which they are tried."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        # else Ray asks again at once where all are full
        pending_request.routing_context.should_backoff = True
        name = pending_request.metadata.internal_request_id
        asked = next((one for one in pending_request.args if isinstance(one, Forwarded)), None)
        prompt = NO_PROMPT if asked is None else self._prompts.of(asked)
        replicas = {one.replica_id: one for one in candidate_replicas}

        def settled(future: Any) -> None:
            if future.cancelled():
                self._choice.ended(name)

        pending_request.future.add_done_callback(settled)
        return [[replicas[one]] for one in self._choice.choose(name, replicas, prompt)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Ray once a replica has taken a request."""
        self._choice.moved(pending_request.metadata.internal_request_id, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray once a request has ended, however it has."""
        self._choice.ended(internal_request_id, replica_id)

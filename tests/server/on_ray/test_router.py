"""Ray's router: which replica it tries first, and when a request counts no more."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from server.on_ray.forwarding import Forwarded

ROUTER = "server.on_ray.router"
REPLICAS: list[Any] = [SimpleNamespace(replica_id=name) for name in ("a", "b")]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One of no cluster, on a stand-in for Ray's class, whose import takes seconds."""

    class RequestRouter:
        def initialize_state(self, **kwargs: Any) -> None:
            assert not kwargs

    names = ("ray", "ray.serve", "ray.serve.request_router")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ours = {"RequestRouter": RequestRouter, "PendingRequest": Any, "RunningReplica": Any}
    vars(sys.modules[names[-1]]).update(ours, ReplicaID=str)
    monkeypatch.delitem(sys.modules, ROUTER, raising=False)
    made = importlib.import_module(ROUTER).PrefixRouter()
    made.initialize_state()
    yield made
    sys.modules.pop(ROUTER)


def pending(name: str, *args: Any) -> Any:
    """A request as Ray holds it until a replica has taken it."""
    return SimpleNamespace(
        metadata=SimpleNamespace(internal_request_id=name),
        args=args,
        routing_context=SimpleNamespace(should_backoff=False),
        future=Future[None](),
    )


def order(router: Any, request: Any) -> list[str]:
    ranks = asyncio.run(router.choose_replicas(REPLICAS, request))
    return [str(one.replica_id) for (one,) in ranks]


def asked(text: str) -> Forwarded:
    return Forwarded({"type": "http"}, json.dumps({"prompt": text, "max_tokens": 1}).encode())


def test_a_conversation_stays_with_its_replica_and_another_goes_elsewhere(router: Any) -> None:
    homes = {}
    for turn in range(3):
        for user in ("first", "second"):
            text = f"{user} " * 60 + "and so on " * turn
            request = pending(f"{user} {turn}", asked(text))
            replicas = order(router, request)
            assert sorted(replicas) == ["a", "b"], "the other one is tried where the best is full"
            assert homes.setdefault(user, replicas[0]) == replicas[0]
            assert request.routing_context.should_backoff
            router.on_request_routed(request, replicas[0], None)
            router.on_request_completed(replicas[0], f"{user} {turn}")
    assert homes["first"] != homes["second"]


def test_what_runs_counts_until_it_has_ended_or_was_given_up(router: Any) -> None:
    free = pending("c")
    first, second = pending("a", asked("x" * 4000)), pending("b", asked("y" * 4000))
    busy, other = order(router, first)
    assert order(router, second) == [other, busy]
    router.on_request_routed(second, busy, None)  # the best was full
    assert order(router, free) == [other, busy]
    router.on_request_completed(busy, "a")
    router.on_request_completed(busy, "b")
    router.on_request_completed(other, "c")
    left = pending("d", asked("z" * 4000))
    chosen, idle = order(router, left)
    assert order(router, pending("e"))[0] == idle
    left.future.cancel()  # its client has left before a replica took it
    assert order(router, pending("f"))[0] == chosen


def test_what_is_no_request_of_the_front_is_spread(router: Any) -> None:
    assert asyncio.run(router.choose_replicas(REPLICAS)) == [REPLICAS], "Ray asks for none"
    assert asyncio.run(router.choose_replicas([], pending("x"))) == [[]]
    assert {order(router, pending(str(n), "no request of the front"))[0] for n in range(2)} == {
        "a",
        "b",
    }

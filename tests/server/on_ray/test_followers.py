"""The other processes of a replica's engine: what they are told, and what is told of their end."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from checkpoints import bundled_model_path
from jaxserve.errors import EngineDeadError
from server.cli import build_parser
from server.commands.serve import asked_for
from server.on_ray.app import Replica
from server.on_ray.followers import Follower, Followers

WORDS = ["serve", f"--model={bundled_model_path()}", "--num-processes=3"]
WORDS += ["--tensor-parallel-size=3"]


class Actor:
    """Ray's handle of one: what it was made with, and a future for its end."""

    def __init__(self, options: dict[str, Any], words: list[str], token: str):
        self.options, self.made, self.end = options, Follower(words, token), Future[int]()
        self.follow = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.end))

    def __getattr__(self, name: str) -> Any:
        assert name == "__ray_ready__"
        return SimpleNamespace(remote=lambda: self)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    """Those that a stand-in for Ray has made."""
    made: list[Actor] = []

    def options(**given: Any) -> Any:
        def remote(words: list[str], token: str) -> Actor:
            made.append(Actor(given, words, token))
            return made[-1]

        return SimpleNamespace(remote=remote)

    ray, util = ModuleType("ray"), ModuleType("ray.util")
    strategies = ModuleType("ray.util.scheduling_strategies")
    vars(ray).update(remote=lambda kind: SimpleNamespace(options=options), get=list)
    vars(util).update(get_node_ip_address=lambda: "127.0.0.1")
    vars(util).update(get_current_placement_group=lambda: "group")
    vars(strategies).update(PlacementGroupSchedulingStrategy=lambda *place: place)
    for module in (ray, util, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_each_is_in_its_bundle_and_knows_process_0(actors: list[Actor]) -> None:
    followers = Followers(WORDS, 3, {"num_gpus": 2})
    args = build_parser("serve").parse_args(followers.words)
    first = asked_for(args).config
    token = Path(str(first.process_token_file)).read_text()
    assert first.process_id == 0 and len(token) == 64
    for number, one in enumerate(actors, 1):
        assert one.options == {"num_gpus": 2, "scheduling_strategy": ("group", number)}
        config = one.made._config
        assert (config.process_id, config.coordinator) == (number, first.coordinator)
        assert config.process_token_file != first.process_token_file, "of its own host"
        assert Path(str(config.process_token_file)).read_text() == token
    assert len(actors) == 2


@pytest.mark.parametrize("how", [70, RuntimeError("its worker died")])
def test_the_end_of_one_is_told(actors: list[Actor], how: Any) -> None:
    followers = Followers(WORDS, 3, {})
    followers.check()
    if isinstance(how, int):
        actors[1].end.set_result(how)
    else:
        actors[1].end.set_exception(how)
    with pytest.raises(EngineDeadError, match=r"process 2 of the engine has ended: .*(70|died)"):
        followers.check()


def test_a_replica_ends_once_another_process_has_ended(
    actors: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its engine is replaced, which would wait for that process."""
    monkeypatch.delattr(Replica, "__del__")  # Ray awaits it
    replica = Replica.__new__(Replica)
    replica._life, replica._begun, replica._app = AsyncExitStack(), True, Starlette()
    replica._app.state.service = SimpleNamespace(engine=SimpleNamespace(is_restarting=True))
    replica._followers = Followers(WORDS, 3, {})
    asyncio.run(replica.check_health())
    ends: list[float] = []
    monkeypatch.setattr("server.on_ray.app.exit_after", lambda seconds, code: ends.append(seconds))
    actors[0].end.set_result(1)
    with pytest.raises(EngineDeadError, match="process 1 of the engine"):
        asyncio.run(replica.check_health())
    assert len(ends) == 1, "its requests go to another one"

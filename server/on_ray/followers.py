"""The other processes of a replica's engine, as actors in the other bundles of the replica."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from typing import IO, Any, cast

from jaxserve.errors import EngineDeadError, shown
from jaxserve.isolation.following import follow
from jaxserve.processes.network import free_port
from server.cli import build_parser
from server.commands.serve import asked_for


class Followers:
    """All processes of an engine but process 0, which the replica itself has.

    They end with the actor that has made them, and are made again with it alone.

    Args:
        words: the command line of every process.
        count: of the processes, with process 0.
        actor: options of the actor of each.

    Attributes:
        words: the command line of process 0.

    Raises:
        RayError: one cannot be started.
    """

    words: list[str]

    def __init__(self, words: list[str], count: int, actor: Mapping[str, Any]) -> None:
        # imported here: an engine of one process has no actors of its own
        import ray
        from ray.util import get_current_placement_group, get_node_ip_address
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host, token = get_node_ip_address(), secrets.token_hex()
        where = f"[{host}]" if ":" in host else host
        shared = [*words, f"--coordinator={where}:{free_port(host)}"]
        self._token = _kept(token)
        self.words = [*shared, f"--process-token-file={_path_of(self._token)}"]
        group, kind = get_current_placement_group(), ray.remote(Follower)
        actors = {}
        for number in range(1, count):
            place = PlacementGroupSchedulingStrategy(group, number)
            made = kind.options(**actor, scheduling_strategy=place)
            actors[number] = made.remote([*shared, f"--process-id={number}"], token)
        # a host may have to prepare its environment: process 0 does not wait that long for it
        ray.get([one.__ray_ready__.remote() for one in actors.values()])
        self._ends: dict[int, Future[int]] = {
            number: one.follow.remote().future() for number, one in actors.items()
        }

    def check(self) -> None:
        """Raises EngineDeadError: one has ended, which says how."""
        for number, end in self._ends.items():
            if end.done():
                error = end.exception()
                how = f"with exit code {end.result()}" if error is None else shown(str(error))
                raise EngineDeadError(f"process {number} of the engine has ended: {how}")


class Follower:
    """One of them. Ray makes it in a process of its own, which has the devices of its bundle.

    Args:
        words: its command line.
        token: the secret of the engine's processes.
    """

    def __init__(self, words: list[str], token: str) -> None:
        self._token = _kept(token)
        own = f"--process-token-file={_path_of(self._token)}"
        args = build_parser("serve").parse_args([*words, own])
        self._config, _, self._isolation = asked_for(args)

    def follow(self) -> int:
        """Serve process 0 until it closes the engine. Returns the exit code of `jaxserve serve`."""
        return follow(self._config, self._isolation)


def _kept(token: str) -> IO[bytes]:
    """A file in memory alone, on Linux: nothing of it is left when this process is killed."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = open(os.memfd_create("jaxserve-token"), "wb", buffering=0)  # noqa: SIM115
    else:
        file = cast(IO[bytes], tempfile.NamedTemporaryFile(buffering=0))  # noqa: SIM115
    file.write(token.encode())
    return file


def _path_of(file: IO[bytes]) -> str:
    """Where processes of this user read a file that this process holds open."""
    if isinstance(file.name, str):
        return file.name
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"

"""Starts a process for an engine before this one has imported what speaks to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.errors import EngineDeadError


class Place(NamedTuple):
    """The part of the machine that a process gets.

    Attributes:
        variables: of its environment, beside those of this process.
        cores: numbers of the cores that it may use, all its threads together; None: those of this
            process.
    """

    variables: Mapping[str, str] = MappingProxyType({})
    cores: tuple[int, ...] | None = None


ANYWHERE = Place()


class EarlyProcess:
    """A process for an engine, which imports while this one does, and a socket between the two.

    The socket has no name: no other process can connect to it.

    Args:
        module: what it runs; its arguments are the number of its end's descriptor and the id of
            this process, with which it ends.
        place: its part of the machine.
        descriptors: that it inherits, by the same numbers.

    Raises:
        EngineDeadError: it cannot be started.
    """

    def __init__(self, module: str, place: Place = ANYWHERE, descriptors: Sequence[int] = ()):
        # it imports what this process does, and nothing of the working folder beside that
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        variables = {**os.environ, "PYTHONPATH": paths, **place.variables}
        try:
            ours, theirs = socket.socketpair()
            with contextlib.ExitStack() as unless_started, theirs:
                unless_started.enter_context(ours)
                for end in (ours, theirs):
                    end.setblocking(True)  # whatever `socket.setdefaulttimeout` was told
                words = [module, str(theirs.fileno()), str(os.getpid())]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", *words],
                    stdin=subprocess.DEVNULL,
                    env=variables,
                    pass_fds=[theirs.fileno(), *descriptors],
                )
                if place.cores is not None:  # it has no other thread yet, and later ones follow
                    os.sched_setaffinity(self._process.pid, place.cores)
                unless_started.pop_all()
        except OSError as error:
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from error
        self._stream, self._is_taken = ours, False

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and this end of the socket: the caller's from now on; once."""
        assert not self._is_taken
        self._is_taken = True
        return self._process, self._stream

    def close(self) -> None:
        """End it, unless it was taken."""
        if not self._is_taken:
            self._process.kill()
            self._process.wait()
            self._stream.close()


def stream_of(descriptor: str) -> socket.socket:
    """In the process: its end of the socket, which its own children do not get."""
    stream = socket.socket(fileno=int(descriptor))
    stream.set_inheritable(False)
    return stream

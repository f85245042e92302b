"""Starts a process for an engine before this one has imported what speaks to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from jaxserve.errors import EngineDeadError


class EarlyProcess:
    """A process for an engine, which imports while this one does, and a socket between the two.

    The socket has no name: no other process can connect to it.

    Args:
        module: what it runs; its argument is the number of its end's descriptor.

    Raises:
        EngineDeadError: it cannot be started.
    """

    def __init__(self, module: str):
        self._stream, theirs = socket.socketpair()
        # it imports what this process does, and nothing of the working folder beside that
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        variables = {**os.environ, "PYTHONPATH": paths}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, env=variables, pass_fds=[theirs.fileno()]
                )
        except OSError as error:
            self._stream.close()
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from error
        self._is_taken = False

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

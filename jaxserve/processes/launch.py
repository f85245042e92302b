"""Starts a process for an engine before this one has imported what speaks to it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from jaxserve.errors import EngineDeadError
from jaxserve.processes import socket_folders

CONNECT_S = 60.0  # a machine that is short of memory may take long to start Python
POLL_S = 0.1
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Listener:
    """A Unix socket that only this user can reach: of mode 0700, in a folder of its own.

    Folders of servers that were ended hard are removed.
    """

    def __init__(self) -> None:
        socket_folders.remove_stale()
        self._folder = tempfile.TemporaryDirectory(prefix=socket_folders.PREFIX)  # of mode 0700
        self._owner = socket_folders.own(Path(self._folder.name))
        self.path = str(Path(self._folder.name) / socket_folders.SOCKET)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        os.chmod(self.path, 0o700)
        self._socket.listen(1)
        self._socket.settimeout(POLL_S)
        self._turn = threading.Lock()

    def accept(self, process: subprocess.Popen[bytes]) -> socket.socket:
        """The connection of a process that was told the path.

        Raises:
            EngineDeadError: it ended, or does not come.
        """
        deadline = time.monotonic() + CONNECT_S
        with self._turn:  # processes are started one after the other
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    stream, _ = self._socket.accept()
                except TimeoutError:
                    continue
                if _peer(stream) in (process.pid, None):
                    stream.setblocking(True)
                    return stream
                stream.close()
        raise EngineDeadError("the engine's process does not connect")

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()
        self._owner.close()


def launch(listener: Listener, module: str) -> subprocess.Popen[bytes]:
    """A process that imports what an engine needs, connects to the listener and waits.

    Raises:
        EngineDeadError: it cannot be started.
    """
    # it imports what this process does, and nothing of the working folder beside that
    command = [sys.executable, "-P", "-m", module, listener.path]
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    variables = {**os.environ, "PYTHONPATH": paths}
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables)
    except OSError as error:
        raise EngineDeadError(f"the engine's process cannot be started: {error}") from error


class EarlyProcess:
    """The first engine's process, which imports while this one does.

    Args:
        module: what it runs.

    Raises:
        EngineDeadError: it cannot be started.
    """

    def __init__(self, module: str):
        self._listener = Listener()
        try:
            self._process = launch(self._listener, module)
        except EngineDeadError:
            self._listener.close()
            raise
        self._is_taken = False

    def take(self) -> tuple[Listener, subprocess.Popen[bytes]]:
        """Both are the caller's from now on; once."""
        assert not self._is_taken
        self._is_taken = True
        return self._listener, self._process

    def close(self) -> None:
        """End it, unless it was taken."""
        if self._is_taken:
            return
        self._is_taken = True
        self._process.kill()
        self._process.wait()
        self._listener.close()


def _peer(stream: socket.socket) -> int | None:
    """The process at the other end; None where the system does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    data = stream.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid

"""A front's own process: `python -m server.fronts.child DESCRIPTOR PARENT`.

It answers HTTP on a socket that it inherits, with an engine that is another process's. It ends when
it is told to, or with that process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from jaxserve.boundary.front_messages import FrontStart
from jaxserve.processes.launch import stream_of
from jaxserve.processes.wire import Channel

PARENT_S = 0.5  # between two looks at whether the server is there


def main(arguments: list[str]) -> int:
    """Answer HTTP for the server at the other end of a socket; returns the exit code."""
    # a signal to the whole group is for the server, which lets requests finish
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(int(arguments[1]),), daemon=True).start()
    stream = stream_of(arguments[0])
    channel = Channel(stream)
    from server.fronts import front  # most of a start, while the engine loads

    start = channel.receive()
    if start is None:
        return 0
    assert isinstance(start, FrontStart)
    front.Front(start, stream, channel).run()
    return 0


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Ending a process whose threads and imports cannot be interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

# Seconds that threads get to end with the process, whatever they are doing.
EXIT_S = 8.0


def exit_now(code: int) -> NoReturn:
    """End the process at once.

    A thread inside a compilation cannot be stopped, and the interpreter's ordinary end would wait
    for it or tear it apart.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a pipe that was closed holds up no end
        os._exit(code)


def exit_after(seconds: float, code: int) -> None:
    """End the process at once if it is still there after so many seconds."""
    deadline = threading.Timer(seconds, exit_now, (code,))
    deadline.daemon = True
    deadline.start()


def exit_soon(code: int) -> NoReturn:
    """End the process as the interpreter does, which waits for a compilation, within EXIT_S.

    Ctrl-C ends it at once: the interpreter would wait no longer, and cut the compilation off.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    exit_after(EXIT_S, code)
    sys.exit(code)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within, Ctrl-C ends the process at once and without a word, as SIGTERM does.

    For imports, compilations and loading: a KeyboardInterrupt there is swallowed by the code that
    catches it, or tears native modules apart.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""Ending a process whose threads and imports cannot be interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """End the process at once.

    A thread inside a compilation cannot be stopped, and the interpreter's ordinary end would wait
    for it or tear it apart.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within, Ctrl-C ends the process at once and without a word, as SIGTERM does.

    For imports, compilations and loading: a KeyboardInterrupt there is swallowed by whoever
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

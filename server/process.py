"""Ending a process whose threads and imports cannot be interrupted."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

logger = logging.getLogger("jaxserve.server")

OTHER_DESCRIPTORS = 1536  # files of a model, pipes, and connections beyond the limit


def exit_now(code: int) -> NoReturn:
    """End the process at once.

    A thread inside a compilation cannot be stopped, and the interpreter's ordinary end would wait
    for it or tear it apart.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def raise_descriptor_limit(connections: int) -> None:
    """Let the process have so many connections open, as far as the system's hard limit goes."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < connections + OTHER_DESCRIPTORS:
        logger.warning(
            "the system lets this process have %d open files: too few for --max-connections %d",
            soft,
            connections,
        )


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

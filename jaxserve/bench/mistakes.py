"""Mistakes of a command's user: one line instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from jaxserve.errors import JaxServeError, lacks_memory


def in_a_line(name: str, run: Callable[[], int]) -> int:
    """The exit status of a command; 1 after an expected error, which standard error names.

    Raises:
        Exception: a bug, which keeps its traceback.
    """
    try:
        return run()
    except Exception as error:
        # not imported here: without memory that would fail, and its error is none before it is
        checkpoints = sys.modules.get("checkpoints.errors")
        known = (JaxServeError, *([checkpoints.CheckpointError] if checkpoints else []))
        text, reason = str(error), lacks_memory(error)
        if reason is not None and not isinstance(error, known):
            text = f"too little memory, or a limit on it (ulimit -v): {reason}"
        elif not isinstance(error, (*known, OSError)):
            raise
        print(f"{name}: {text}", file=sys.stderr)
        return 1

"""Mistakes of a benchmark's user: one line instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from jaxserve.errors import JaxServeError


def in_a_line(name: str, run: Callable[[], int]) -> int:
    """The exit status of a benchmark; 1 after an expected error, which standard error names."""
    from checkpoints import CheckpointError

    try:
        return run()
    except (JaxServeError, CheckpointError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1

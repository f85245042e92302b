"""The cores of a process: an engine makes as many threads as it finds."""

from __future__ import annotations

import os


def use_cores(count: int) -> None:
    """Keep this process and what it starts on so many of its cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])

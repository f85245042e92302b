"""Ending a process whose threads cannot be interrupted."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """End the process at once.

    A thread inside a compilation cannot be stopped, and the interpreter's ordinary end would wait
    for it or tear it apart.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

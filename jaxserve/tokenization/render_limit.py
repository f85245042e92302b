"""A time limit on chat templates, which are code of the model's folder over a user's messages."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

TEMPLATE_FILE = "<template>"  # what jinja calls the code of a template


class RenderTimeoutError(Exception):
    """A template took longer than it may."""


@contextlib.contextmanager
def render_limit(seconds: float) -> Iterator[None]:
    """Within, a line of a template that is reached after `seconds` raises.

    A thread cannot be stopped from outside; here the interpreter looks at the clock at every line
    of template code, which a loop has to pass. Nothing else is slowed down.

    Raises:
        RenderTimeoutError: in the template.
    """
    deadline = time.monotonic() + seconds

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise RenderTimeoutError(f"the chat template took longer than {seconds:g} s")
        return at_line

    def at_call(frame: FrameType, event: str, argument: Any) -> Any:
        return at_line if frame.f_code.co_filename == TEMPLATE_FILE else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)

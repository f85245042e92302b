"""What the scripts of this folder ask for, and how they run: python NAME_calls.py URL.

Clients read the annotations of `add` here, so they are no strings.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field

ASK = "What is the sum of two and three?"
MESSAGES: Any = [{"role": "user", "content": ASK}]
PIXEL = (  # a picture
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg=="
)
Digit = Annotated[int, Field(ge=0, le=9)]


class Sum(BaseModel, extra="forbid"):
    """A sum; the model cannot know it, but what it writes must be one."""

    left: Digit
    right: Digit


def add(a: Digit, b: Digit) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def run(*checks: Callable[[str], Any]) -> None:
    """Give each check the server's address; the exit code is how many have failed."""
    failed = 0
    for check in checks:
        try:
            check(sys.argv[1])
        except Exception:
            failed += 1
            traceback.print_exc()
            print("FAILED", check.__name__)
        else:
            print("ok", check.__name__)
    sys.exit(failed)

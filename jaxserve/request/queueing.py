"""What decides the turn of a request, and its engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Queueing:
    """What decides whose turn it is.

    Attributes:
        arrival_time: when the caller asked, in seconds of `time.monotonic()`.
        priority: the smallest goes first, where the policy is "priority"; else 0.
        timeout: seconds after its arrival when the request ends wherever it is; None: never.
        client: the name of its client; clients take turns, and "" is one client too.
        session: the name that its client gives to requests with common beginnings: where there are
            several engines, they go to one; "": it has none.
    """

    arrival_time: float
    priority: int = 0
    timeout: float | None = None
    client: str = ""
    session: str = ""

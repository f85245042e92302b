"""When a request came, how urgent it is and how long it may take: fields, and headers over them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from jaxserve.errors import ValidationError
from jaxserve.request.queueing import Queueing
from server.protocol.requests import QueuedRequest

PRIORITY_HEADER = "X-Vllm-Priority"  # vLLM's own, so that its routers need no change
TIMEOUT_HEADER = "X-Request-Timeout"
_INTEGER = re.compile(r"-?\d{1,18}")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")

Number = TypeVar("Number", int, float)


def queueing(
    headers: Mapping[str, str],
    body: QueuedRequest,
    arrival_time: float,
    least_priority: int | None = None,
    client: str = "",
) -> Queueing:
    """What decides whose turn a request of `client` is; headers win over the fields of the body.

    Its priority is `least_priority` or more, as is said of its key; None: whatever it says.

    Raises:
        ValidationError: a header that is no such number.
    """
    priority = _header(headers, PRIORITY_HEADER, _INTEGER, int, "an integer")
    timeout = _header(
        headers, TIMEOUT_HEADER, _SECONDS, float, "seconds above 0, such as 30 or 0.5"
    )
    asked = (body.priority or 0) if priority is None else priority
    return Queueing(
        arrival_time,
        asked if least_priority is None else max(asked, least_priority),
        body.timeout if timeout is None else timeout,
        client,
        body.session,
    )


def _header(
    headers: Mapping[str, str],
    name: str,
    pattern: re.Pattern[str],
    kind: Callable[[str], Number],
    allowed: str,
) -> Number | None:
    text = headers.get(name)
    if text is None:
        return None
    value = kind(text) if pattern.fullmatch(text) else None
    if value is None or (name == TIMEOUT_HEADER and value <= 0):
        raise ValidationError(name, text, allowed)
    return value

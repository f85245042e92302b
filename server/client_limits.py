"""What one server takes from its clients, and how long it waits for them: flags of `serve`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ValidationError

DEFAULT_MAX_BODY_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Limits:
    """Limits at the edge of the server.

    Attributes:
        max_body_bytes: of one request; more is refused with 413.
        max_pending_body_bytes: of all bodies that are being read or parsed; more is refused with
            503, since they may be sent again.
        max_choices: completions that one request may start, prompts times n.
        max_response_entries: of one response, what it says of its prompts: choices times prompt
            tokens times one, and one for each log-probability of them.
        max_unread_answer_bytes: of all answers that clients have not read; where it is more, the
            client with the most loses the answer of which it has taken nothing for longest.
        max_connections: open at a time; those beyond may ask for the server's health alone.
        idle_timeout: seconds that a connection may stay open between two requests.
        write_timeout: seconds after which a client that reads nothing of its answer is cut off.
        keep_alive_interval: seconds after which a stream that has nothing to say says so.
        max_stored_responses: of `/v1/responses`, kept for others to go on from; 0: none are.
        max_stored_bytes: of them and their conversations.
        share_prefix_cache: requests of one API key find what was computed for those of another.
        allow_control_tokens: control tokens in messages' text are tokens and not text.
    """

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_pending_body_bytes: int = 64 * 2**20
    max_choices: int = 1024
    max_response_entries: int = 2**17
    max_unread_answer_bytes: int = 256 * 2**20
    max_connections: int = 4096
    idle_timeout: float = 5.0
    write_timeout: float = 60.0
    keep_alive_interval: float = 10.0
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20
    share_prefix_cache: bool = False
    allow_control_tokens: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_choices",
            "max_response_entries",
            "max_unread_answer_bytes",
            "max_connections",
        ):
            if getattr(self, name) < 1:
                raise ValidationError(name, getattr(self, name), "1 or more")
        for name in ("max_stored_responses", "max_stored_bytes"):
            if getattr(self, name) < 0:
                raise ValidationError(name, getattr(self, name), "0 or more")
        if self.max_pending_body_bytes < self.max_body_bytes:
            allowed = f"max_body_bytes={self.max_body_bytes} or more"
            raise ValidationError("max_pending_body_bytes", self.max_pending_body_bytes, allowed)
        for name in ("idle_timeout", "write_timeout", "keep_alive_interval"):
            if not 0 < getattr(self, name) < 10**6:  # nan neither
                raise ValidationError(name, getattr(self, name), "a number of seconds above 0")

"""What one server takes from its clients, and how long it waits for them: flags of `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxserve.config.settings import Integer, Number, Switch, check, setting
from jaxserve.errors import ValidationError

_limit = partial(setting, reader="clients")
_SECONDS = Number(above=0.0, most=1e6, unit="seconds", metavar="SECONDS")


@dataclass(frozen=True)
class Limits:
    """Limits at the edge of the server; docs/security.md says what is done beyond each.

    Raises:
        ValidationError: one is out of its range.
    """

    max_body_bytes: int = _limit(4 * 2**20, Integer(1), "Bytes of the largest request body.")
    max_pending_body_bytes: int = _limit(
        64 * 2**20, Integer(1), "Bytes of all bodies that are being read or parsed at a time."
    )
    max_choices: int = _limit(1024, Integer(1), "Most completions of a request, prompts x n.")
    max_response_entries: int = _limit(
        2**17,
        Integer(1),
        "Most that one response may say of its prompts: choices x prompt tokens x one, and one "
        "for each log-probability of them.",
    )
    max_unread_answer_bytes: int = _limit(
        256 * 2**20,
        Integer(1),
        "Bytes of all answers that clients have not read; beyond it the client with the most loses "
        "the answer of which it has taken nothing for longest.",
    )
    max_connections: int = _limit(
        4096, Integer(1), "Open at a time; those beyond may ask for the server's health alone."
    )
    idle_timeout: float = _limit(
        5.0, _SECONDS, "Seconds that a connection may stay open without a request."
    )
    write_timeout: float = _limit(
        60.0, _SECONDS, "Seconds after which a client that reads nothing of its answer is cut off."
    )
    keep_alive_interval: float = _limit(
        10.0, _SECONDS, "Seconds after which a stream that has nothing to say sends a comment."
    )
    max_stored_responses: int = _limit(
        1024, Integer(0), "Responses kept for previous_response_id, 0 for none."
    )
    max_stored_bytes: int = _limit(
        64 * 2**20, Integer(0), "Bytes of responses that are kept and their conversations."
    )
    share_prefix_cache: bool = _limit(
        False,
        Switch(),
        "Requests find in the prefix cache what was computed for those of other API keys, which "
        "their speed then tells of; else each key has its own.",
    )
    allow_control_tokens: bool = _limit(
        False,
        Switch(),
        "Control tokens in messages' text are tokens, with which a message can pretend to be "
        "another one; else they are text.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_pending_body_bytes < self.max_body_bytes:
            allowed = f"max_body_bytes={self.max_body_bytes} or more"
            raise ValidationError("max_pending_body_bytes", self.max_pending_body_bytes, allowed)

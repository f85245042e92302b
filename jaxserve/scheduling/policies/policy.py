"""What a policy decides of one client's requests: which begins, computes first, loses its slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jaxserve.request import Request


class Policy(Protocol):
    """Holds the requests without a slot and says which is next. The scheduler calls it.

    Each client has its own instance, and `ClientTurns` stands above them. A policy that only orders
    requests is a `FirstComeFirstServed` with another `key`. It is made with `PolicyInputs`.
    """

    def rank(self, num_prompt: int, priority: int, num_output: int = 0) -> int:
        """Requests of a smaller or the same rank may be served before this one if they wait.

        The ledger predicts waits by it, from the request's sizes alone.

        Args:
            num_prompt: tokens of its prompt.
            priority: see `Queueing.priority`.
            num_output: see `AddGroup.num_output_asked`.
        """

    def key(self, request: Request) -> Any:
        """A running request's place, the same while it runs: the last one is preempted first.

        Keys of two requests must compare, and be equal for none.
        """

    def push(self, request: Request) -> None:
        """A request waits: it is new, or has lost its slot."""

    def discard(self, request: Request) -> None:
        """It does not wait any more: it has a slot or has ended."""

    def peek(self, fits: Callable[[Request], bool]) -> Request | None:
        """The request that gets the next slot, None if none waits.

        If it does not fit, none of its client gets a slot in this step.

        Args:
            fits: whether the free pages hold a request's tokens and one more.
        """

    def lets_pass(self, request: Request) -> bool:
        """Whether one that does not wait, but could begin for free now, may do so before all."""

    def requests(self) -> list[Request]:
        """All waiting requests."""

    def __len__(self) -> int:
        """How many wait."""

    def arrange(self, prefilling: list[Request]) -> tuple[list[Request], list[Request]]:
        """The requests that compute known tokens before the waiting ones of a step, and after.

        Called once a step. Tokens that the first list leaves over go to the second.

        Args:
            prefilling: running requests with tokens to compute, by their keys.
        """

    def computes(self, request: Request, num_tokens: int) -> None:
        """A chunk of known tokens is planned."""

    def entered(self, request: Request) -> None:
        """A request has got a slot."""

    def left(self, request: Request) -> None:
        """A request is about to give its slot up: it has ended or is preempted."""

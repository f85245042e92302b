"""What a policy may read of the engine, beside the calls of its methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.request import Request


def _none_found(request: Request) -> int:
    return 0


def _always_busy() -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Given to each policy when it is made.

    Attributes:
        num_found: first tokens of a waiting request that the prefix cache holds now, which are not
            computed; it hashes the prompt once.
        device_busy: the share of the last seconds in which the device computed steps, 0 to 1.
    """

    num_found: Callable[[Request], int] = _none_found
    device_busy: Callable[[], float] = _always_busy


NO_INPUTS = PolicyInputs()  # of a policy without an engine: in the ledger and in simulations

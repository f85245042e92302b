"""What a policy may read of the engine, beside the calls of its methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.request.request import Request


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Given to each policy when it is made.

    Attributes:
        num_found: first tokens of a waiting request that the prefix cache holds now, which are not
            computed; it hashes the prompt once.
        device_busy: the share of the last seconds in which the device computed steps, 0 to 1.
    """

    num_found: Callable[[Request], int] = lambda request: 0
    device_busy: Callable[[], float] = lambda: 1.0


NO_INPUTS = PolicyInputs()  # of a policy without an engine: in the ledger and in simulations

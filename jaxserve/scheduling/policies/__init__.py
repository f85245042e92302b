"""Policies, one a file: the order of requests. `make_policy` chooses by name.

One of the operator's own is a class that is imported by the name of its module (`named.py`).
"""

from __future__ import annotations

from typing import Protocol

from jaxserve.scheduling.policies.first_come import FirstComeFirstServed
from jaxserve.scheduling.policies.inputs import NO_INPUTS, PolicyInputs
from jaxserve.scheduling.policies.length import Length
from jaxserve.scheduling.policies.named import policy_of_name
from jaxserve.scheduling.policies.policy import Policy
from jaxserve.scheduling.policies.priority import Priority

__all__ = [
    "FirstComeFirstServed",
    "Length",
    "Policy",
    "PolicyInputs",
    "Priority",
    "make_policy",
]


class PolicySettings(Protocol):
    """The settings that policies read, as an asked or a resolved configuration has them."""

    @property
    def scheduling_policy(self) -> str: ...
    @property
    def length_classes(self) -> tuple[int, ...]: ...
    @property
    def output_classes(self) -> tuple[int, ...]: ...
    @property
    def length_shares(self) -> tuple[int, ...]: ...
    @property
    def max_overtaken_tokens(self) -> int: ...


def make_policy(settings: PolicySettings, inputs: PolicyInputs = NO_INPUTS) -> Policy:
    """The policy that the settings name.

    Raises:
        ValidationError: it is named `module:Class`, and that is no policy.
    """
    match settings.scheduling_policy:
        case "fcfs":
            return FirstComeFirstServed(inputs)
        case "priority":
            return Priority(inputs)
        case "length":
            return Length(
                settings.length_classes,
                settings.length_shares,
                settings.max_overtaken_tokens,
                output_bounds=settings.output_classes,
                inputs=inputs,
            )
        case name:
            return policy_of_name(name, inputs)

"""Policies, one a file: whose turn it is. `make_policy` chooses by name."""

from __future__ import annotations

from typing import Protocol

from jaxserve.scheduling.policies.first_come import FirstComeFirstServed
from jaxserve.scheduling.policies.length import Length
from jaxserve.scheduling.policies.policy import Policy
from jaxserve.scheduling.policies.priority import Priority

__all__ = ["FirstComeFirstServed", "Length", "Policy", "Priority", "make_policy"]


class PolicySettings(Protocol):
    """The settings that policies read, as an asked or a resolved configuration has them."""

    @property
    def scheduling_policy(self) -> str: ...
    @property
    def length_classes(self) -> tuple[int, ...]: ...
    @property
    def length_shares(self) -> tuple[int, ...]: ...
    @property
    def max_overtaken_tokens(self) -> int: ...


def make_policy(settings: PolicySettings) -> Policy:
    """The policy that the settings name."""
    match settings.scheduling_policy:
        case "priority":
            return Priority()
        case "length":
            return Length(
                settings.length_classes, settings.length_shares, settings.max_overtaken_tokens
            )
        case _:
            return FirstComeFirstServed()

"""Policies, one a file: the order of requests. `make_policy` chooses by name.

One of the operator's own is a class that is imported by the name of its module (`own_policy.py`).
"""

from __future__ import annotations

from jaxserve.config.engine_config import EngineConfig
from jaxserve.scheduling.policies.first_come import FirstComeFirstServed
from jaxserve.scheduling.policies.length import Length
from jaxserve.scheduling.policies.own_policy import policy_of_name
from jaxserve.scheduling.policies.policy import Policy
from jaxserve.scheduling.policies.policy_inputs import NO_INPUTS, PolicyInputs
from jaxserve.scheduling.policies.priority import Priority

__all__ = ["FirstComeFirstServed", "Length", "Policy", "PolicyInputs", "Priority", "make_policy"]


def make_policy(settings: EngineConfig, inputs: PolicyInputs = NO_INPUTS) -> Policy:
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

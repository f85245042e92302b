"""A policy of the operator's own: a class by the name of its module."""

from __future__ import annotations

import inspect

from jaxserve.config.named_object import object_of_name
from jaxserve.errors import ValidationError
from jaxserve.scheduling.policies.policy import Policy
from jaxserve.scheduling.policies.policy_inputs import PolicyInputs

_METHODS = tuple(
    name
    for name, value in vars(Policy).items()
    if inspect.isfunction(value) and (name == "__len__" or not name.startswith("_"))
)


def policy_of_name(name: str, inputs: PolicyInputs) -> Policy:
    """An instance of the class that `module:Class` names; the module is imported.

    Raises:
        ValidationError: it cannot be imported, or does not follow the protocol `Policy`.
    """
    found = object_of_name("scheduling_policy", name, "a policy", type)
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        lacks = f"it lacks {', '.join(missing)}"
        allowed = f"a class with the methods of jaxserve.scheduling.policies.Policy ({lacks})"
        raise ValidationError("scheduling_policy", name, allowed)
    for method in _METHODS:
        parameters = inspect.signature(getattr(Policy, method)).parameters
        try:
            inspect.signature(getattr(found, method)).bind(*parameters)
        except TypeError as error:
            allowed = f"a class whose {method} takes ({', '.join(parameters)}) ({error})"
            raise ValidationError("scheduling_policy", name, allowed) from error
    try:
        made: Policy = found(inputs)
    except Exception as error:  # the class is the operator's: whatever it raises is told
        allowed = f"a class that is made with one argument, PolicyInputs ({error!r})"
        raise ValidationError("scheduling_policy", name, allowed) from error
    return made

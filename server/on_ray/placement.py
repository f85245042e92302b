"""What the processes of a replica ask Ray for: each has a bundle of the replica's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ValidationError

FIELD = "deployment_config.placement_group_bundles"
# Options of actors that ask for something, by the names of Ray's resources.
_RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
_OF_A_KIND = 0.001  # of a device's name: so much Ray asks for with `accelerator_type`


def bundle_of(actor: Mapping[str, Any]) -> dict[str, float]:
    """What an actor with these options asks for."""
    found = {name: actor[option] for option, name in _RESOURCES.items() if actor.get(option)}
    found |= actor.get("resources") or {}
    if kind := actor.get("accelerator_type"):
        found[f"accelerator_type:{kind}"] = _OF_A_KIND
    return found


def bundles_of(actor: Mapping[str, Any], count: int, given: Any = None) -> list[dict[str, float]]:
    """A bundle for each process of an engine, process 0 in the first one.

    Args:
        actor: options of the actor of each process.
        count: of the processes.
        given: the bundles; None: each holds what an actor asks for.

    Raises:
        ValidationError: there are not as many, or one holds less than a process asks for.
    """
    asked = bundle_of(actor)
    if given is None:
        return [asked] * count
    if not isinstance(given, (list, tuple)) or len(given) != count:
        allowed = f"a list of one bundle for each of num_processes={count}"
        raise ValidationError(FIELD, given, allowed)
    for number, bundle in enumerate(given):
        if not isinstance(bundle, Mapping):
            raise ValidationError(f"{FIELD}[{number}]", bundle, "a mapping of resources")
        for name, least in asked.items():
            has = bundle.get(name)
            if not isinstance(has, (int, float)) or has < least:
                allowed = f"{least} or more, which each process asks for"
                raise ValidationError(f"{FIELD}[{number}].{name}", has, allowed)
    return [dict(bundle) for bundle in given]

"""Whether a Ray cluster has room for the replicas of an application, before any is deployed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import ValidationError
from server.on_ray.placement import bundle_of

logger = logging.getLogger(__name__)

FIELD = "deployment_config"
ROUNDING = 1e-6  # of Ray's own fractions of a resource
Resources = Mapping[str, float]


def check(options: Mapping[str, Any], front: Mapping[str, Any], is_required: bool) -> None:
    """Compare what an application asks for first with what the connected cluster has free.

    A warning says what is missing, for Ray may add hosts, and until then waits for them. Nothing is
    compared where the deployment has replicas: an update takes the room of what it replaces. How
    bundles lie on the hosts is not compared.

    Args:
        options: of the replicas' deployment.
        front: of the front's.
        is_required: refuse in the place of a warning.

    Raises:
        ValidationError: names what is missing.
    """
    # imported here: a configuration is read without Ray
    import ray
    from ray.util import list_named_actors

    if not ray.is_initialized():
        return
    # of replicas: what Serve tells of an application is empty while an update of it is built
    actors = (one["name"] for one in list_named_actors(all_namespaces=True))
    if any(f"#{options['name']}#" in name for name in actors):
        return
    hosts = [one["Resources"] for one in ray.nodes() if one["Alive"]]
    count = first_replicas(options)
    bundles = replica_bundles(options) * count + [_bundle(front)] * first_replicas(front)
    missing = lacking(bundles, hosts, ray.available_resources())
    if missing is None:
        return
    told = f"the cluster has no room for {count} replicas and the front: {missing}"
    if is_required:
        raise ValidationError(f"{FIELD}.num_replicas", count, told)
    logger.warning("%s; Ray waits until hosts are added or others end", told)


def lacking(
    bundles: Sequence[Resources], hosts: Sequence[Resources], free: Resources
) -> str | None:
    """What of some bundles has no place, in words; None: nothing.

    Args:
        bundles: each has to be on one host.
        hosts: what each has in all.
        free: what nothing on any host has taken, in sum.
    """
    for bundle in bundles:
        if not any(_holds(host, bundle) for host in hosts):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            return f"no host has {asked}"
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    for name in names:
        amount = sum(bundle.get(name, 0) for bundle in bundles)
        if free.get(name, 0) < amount - ROUNDING:
            return f"{amount:g} {name} are asked for, and {free.get(name, 0):g} free"
    return None


def first_replicas(options: Mapping[str, Any]) -> int:
    """The replicas that a deployment has before any request has come."""
    scaling, count = options.get("autoscaling_config"), options.get("num_replicas")
    if isinstance(scaling, Mapping):
        first = scaling.get("initial_replicas")
        count = scaling.get("min_replicas", 1) if first is None else first
    return count if isinstance(count, int) else 1  # "auto", or nothing is said


def replica_bundles(options: Mapping[str, Any]) -> list[Resources]:
    """What one replica asks for, a bundle for each of its processes."""
    return list(options.get("placement_group_bundles") or [_bundle(options)])


def _bundle(options: Mapping[str, Any]) -> Resources:
    """Of a deployment without bundles; Ray gives a replica one CPU where nothing is said."""
    return bundle_of({"num_cpus": 1} | dict(options.get("ray_actor_options") or {}))


def _holds(host: Resources, bundle: Resources) -> bool:
    return all(host.get(name, 0) >= amount - ROUNDING for name, amount in bundle.items())

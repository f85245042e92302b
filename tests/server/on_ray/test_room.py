"""Whether a cluster has room for an application: what is missing is told, or refused."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from jaxserve.errors import ValidationError
from server.on_ray.room import check, first_replicas, lacking

HOST = {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("bundles", "free", "missing"),
    [
        ([{"GPU": 4}, {"GPU": 4}], {"CPU": 16, "GPU": 8}, None),
        ([{"GPU": 5}], {"CPU": 16, "GPU": 8}, "no host has 5 GPU"),
        ([{"CPU": 1, "TPU": 4}], {"CPU": 16}, "no host has 1 CPU, 4 TPU"),
        ([{"GPU": 2}, {"GPU": 2}], {"GPU": 3}, "4 GPU are asked for, and 3 free"),
        ([{"GPU": 1}], {}, "1 GPU are asked for, and 0 free"),
        ([], {}, None),
    ],
)
def test_what_has_no_place_is_named(bundles: Any, free: Any, missing: str | None) -> None:
    assert lacking(bundles, [HOST, HOST], free) == missing


def test_the_first_replicas_are_those_before_any_request() -> None:
    for options, count in (
        ({}, 1),
        ({"num_replicas": 3}, 3),
        ({"num_replicas": "auto", "autoscaling_config": {}}, 1),
        ({"num_replicas": "auto"}, 1),
        ({"autoscaling_config": {"min_replicas": 0}}, 0),
        ({"autoscaling_config": {"min_replicas": 0, "initial_replicas": 2}}, 2),
    ):
        assert first_replicas(options) == count, options


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of those that a stand-in for Ray has; its one host is `HOST`, with two GPUs free."""
    there: list[str] = []
    ray, util = ModuleType("ray"), ModuleType("ray.util")
    named = lambda all_namespaces: [{"namespace": "serve", "name": name} for name in there]  # noqa: E731
    vars(util).update(list_named_actors=named)
    vars(ray).update(is_initialized=lambda: True, util=util)
    gone = {"Alive": False, "Resources": {"GPU": 64.0}}
    vars(ray).update(nodes=lambda: [{"Alive": True, "Resources": HOST}, gone])
    vars(ray).update(available_resources=lambda: {"CPU": 8.0, "GPU": 2.0})
    for module in (ray, util):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return there


def test_a_full_cluster_is_told_or_refused(
    actors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"name": "jaxserve:tiny", "ray_actor_options": {"num_gpus": 1}}
    check(options | {"num_replicas": 2}, {}, True)
    check(options | {"num_replicas": 3}, {}, False)
    (line,) = caplog.messages
    wanted = "no room for 3 replicas and the front: 3 GPU are asked for, and 2 free"
    assert wanted in line
    with pytest.raises(ValidationError, match=f"deployment_config.num_replicas=3 .*{wanted}"):
        check(options | {"num_replicas": 3}, {}, True)
    group = {"placement_group_bundles": [{"GPU": 4}, {"GPU": 5}]}
    with pytest.raises(ValidationError, match="no host has 5 GPU"):
        check(options | group, {}, True)
    with pytest.raises(ValidationError, match="no host has 9 CPU"):
        check(options, {"ray_actor_options": {"num_cpus": 9}}, True)
    actors.append("SERVE_REPLICA::app#jaxserve:tiny#k3x")  # an update takes the room of its own
    check(options | {"num_replicas": 3}, {}, True)

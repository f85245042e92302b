"""The RayService is valid, and deploys what jaxserve's builder takes."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import yaml

from jaxserve.ray import LLMConfig
from tests.deploy.kubernetes.rendering import KUBERNETES
from tests.deploy.kubernetes.schemas.validation import problem
from tests.server.server_process import ROOT


def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text())
    return found


def test_it_is_valid_in_strict_mode() -> None:
    one = service()
    assert problem(one) is None
    one["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["container"] = []
    assert "'container' was unexpected" in str(problem(one))


def test_its_application_is_one_that_the_builder_takes() -> None:
    (application,) = yaml.safe_load(service()["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "jaxserve.ray:build_openai_app"
    (given,) = application["args"]["llm_configs"]
    config = LLMConfig(**given)
    assert config.flags().default_model == "meta-llama/Meta-Llama-3-8B-Instruct"
    (workers,) = service()["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    grace = config.options()["graceful_shutdown_timeout_s"]
    assert pod["terminationGracePeriodSeconds"] > grace
    assert service()["spec"]["rayClusterDeletionDelaySeconds"] > grace
    # a replica's devices are there, and a worker for each replica
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == config.options()["ray_actor_options"]["num_gpus"] == 1
    # the autoscaler reads it so, quotes and backslashes dropped
    told = json.loads(workers["rayStartParams"]["resources"][1:-1].replace("\\", ""))
    assert told == {f"accelerator_type:{config.accelerator_type}": 1}
    scaling = config.deployment_config["autoscaling_config"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        scaling["min_replicas"],
        scaling["max_replicas"],
    )


def test_its_ray_is_one_that_the_extra_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = [one for one in project["optional-dependencies"]["ray"] if one.startswith("ray[")]
    version = service()["spec"]["rayClusterConfig"]["rayVersion"]
    assert version.startswith(bound.partition(">=")[2])

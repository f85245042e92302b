"""jaxserve under Ray Serve: its configuration, and two replicas on a local cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from jaxserve.ray import LLMConfig
from tests.server.server_process import ROOT, free_port

MODEL = str(bundled_model_path())
LOADING = {"model_id": "tiny", "model_source": MODEL}
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")


def config(**fields: Any) -> LLMConfig:
    return LLMConfig(**({"model_loading_config": LOADING} | fields))


def test_a_configuration_is_a_command_line_of_serve() -> None:
    found = config(engine_kwargs={"max_num_seqs": 4, "enable-prefix-caching": False}).flags()
    assert (found.default_model, found.served_model_name) == (MODEL, ["tiny"])
    assert found.max_num_seqs == 4 and not found.enable_prefix_caching
    assert LLMConfig({"model_id": "owner/name"}).flags().default_model == "owner/name"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_loading_config": {"model": "x"}}, "model_loading_config.model"),
        ({"model_loading_config": {}}, "model_loading_config.model_id"),
        ({"model_loading_config": "x"}, "a mapping of model_id, model_source"),
        ({"engine_kwargs": {"max_num_seqs": "many"}}, "argument --max-num-seqs"),
        ({"engine_kwargs": {"max_num_seks": 4}}, "did you mean --max-num-seqs"),
        ({"engine_kwargs": {"port": 1}}, "engine_kwargs.port"),
        ({"engine_kwargs": {"model": "x"}}, "engine_kwargs.model"),
        ({"engine_kwargs": {"ssl-certfile": "x"}}, "engine_kwargs.ssl-certfile"),
        ({"engine_kwargs": {"model": "x"}}, "engine_kwargs.model.*model_loading_config"),
        ({"engine_kwargs": {"served-model-name": "x"}}, "engine_kwargs.served-model-name"),
        ({"deployment_config": [1]}, "deployment_config"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (None, {}),
        ("H200", {"num_gpus": 6, "resources": {}, "accelerator_type": "H200"}),
        ("TPU-V6E", {"resources": {"TPU": 6}, "accelerator_type": "TPU-V6E"}),
    ],
)
def test_a_replica_asks_for_its_devices(kind: str | None, wanted: dict[str, Any]) -> None:
    kwargs = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    options = config(accelerator_type=kind, engine_kwargs=kwargs).options()
    assert options["ray_actor_options"] == wanted


def test_a_replica_with_several_engines_asks_for_all_of_their_devices() -> None:
    kwargs = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    options = config(accelerator_type="H200", engine_kwargs=kwargs).options()
    assert options["ray_actor_options"]["num_gpus"] == 6


def test_options_of_the_deployment_win() -> None:
    options = config(
        deployment_config={"num_replicas": 3, "name": "mine", "ray_actor_options": {"num_cpus": 2}},
        runtime_env={"env_vars": {"A": "b"}},
    ).options()
    assert (options["name"], options["num_replicas"]) == ("mine", 3)
    assert options["graceful_shutdown_timeout_s"] == 30
    actor = {"num_cpus": 2, "runtime_env": {"env_vars": {"A": "b"}}}
    assert options["ray_actor_options"] == actor


@needs_ray
@pytest.mark.slow
def test_two_replicas_serve_while_an_engine_and_a_worker_are_killed() -> None:
    command = [sys.executable, "-m", "tests.server.ray_cluster", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["models"] == ["tiny"] and (seen["replicas"], seen["engines"]) == (2, 2)
    right = {int(number) % 8: text for number, text in seen["plain"].items()}
    for phase in ("plain", "engine killed", "afterwards"):
        for number, text in seen[phase].items():
            assert text == right[int(number) % 8], (phase, number, text)
    # a request of a worker that was killed fails, and is never cut and called whole
    ends = seen["worker killed"].items()
    wrong = {n: text for n, text in ends if text != right[int(n) % 8]}
    assert all(text in (500, "RemoteProtocolError", "ReadError") for text in wrong.values()), wrong
    assert len(wrong) < len(ends)  # those of one of two replicas

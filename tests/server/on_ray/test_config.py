"""What is deployed on Ray: a configuration is read, or refused by its field, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from jaxserve.ray import LLMConfig, build_openai_app
from server.on_ray.config import SCALING, TARGET_QUEUED_TOKENS
from server.on_ray.scaling import WorkPolicy

MODEL = str(bundled_model_path())
LOADING = {"model_id": "tiny", "model_source": MODEL}


def config(**fields: Any) -> LLMConfig:
    return LLMConfig(**({"model_loading_config": LOADING} | fields))


def two(bundles: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Of an engine of two processes."""
    deployed = {} if bundles is None else {"placement_group_bundles": bundles}
    wanted = {"num_processes": 2, "tensor_parallel_size": 4}
    return {"engine_kwargs": wanted | kwargs, "deployment_config": deployed}


def scaled(**fields: Any) -> dict[str, Any]:
    return {"deployment_config": {"autoscaling_config": fields or 1}}


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
        ({"model_loading_config": {"model_id": None}}, "model_loading_config.model_id=None"),
        ({"model_loading_config": LOADING | {"model_source": 3}}, "model_source=3"),
        ({"accelerator_type": 3}, "accelerator_type=3"),
        ({"engine_kwargs": {3: 1}}, r"engine_kwargs.3=\.\.\. .*a name that is text"),
        ({"engine_kwargs": {"max_num_seqs": "many"}}, r"engine_kwargs.max_num_seqs=\.\.\. "),
        ({"engine_kwargs": {"max_num_seqs": "many"}}, "argument --max-num-seqs"),
        ({"engine_kwargs": {"max_num_seq": 4}}, "engine_kwargs.max_num_seq="),
        ({"engine_kwargs": {"help": True}}, "engine_kwargs.help="),
        ({"engine_kwargs": {"api_key": ["x", "y"]}}, "engine_kwargs.api_key=.*: one value"),
        ({"engine_kwargs": {"max_num_seks": 4}}, "did you mean --max-num-seqs"),
        ({"engine_kwargs": {"port": 1}}, "engine_kwargs.port"),
        ({"engine_kwargs": {"process-id": 1}}, "process-id=.*as many as num_processes"),
        ({"engine_kwargs": {"num_processes": 0}}, "num_processes=0"),
        (
            two(tensor_parallel_size=3),
            "tensor_parallel_size=3 .*: a multiple of 2 where num_processes is 2",
        ),
        (two(data_parallel_size=2), "data_parallel_size=2 .*: 1 where num_processes is 2"),
        (two(isolate_engine=False), "isolate_engine=False .*: true where num_processes is 2"),
        (two([{"CPU": 1}]), "bundles=.*one bundle for each of num_processes=2"),
        (two([{"CPU": 1}, 3]), r"bundles\[1\]=3 .*a mapping"),
        (two([{"CPU": 1}, {"GPU": 1}]), r"bundles\[1\].CPU=None .*1 or more"),
        ({"engine_kwargs": {"model": "x"}}, "engine_kwargs.model"),
        ({"engine_kwargs": {"ssl-certfile": "x"}}, "engine_kwargs.ssl-certfile"),
        ({"engine_kwargs": {"model": "x"}}, "engine_kwargs.model.*model_loading_config"),
        ({"engine_kwargs": {"served-model-name": "x"}}, "engine_kwargs.served-model-name"),
        ({"deployment_config": [1]}, "deployment_config"),
        (
            {"deployment_config": {"placement_group_bundles": [{}, {}]}},
            "one bundle: .*num_processes is 1",
        ),
        ({"deployment_config": {"placement_group_bundles": 3}}, "placement_group_bundles=3"),
        ({"deployment_config": {"ray_actor_options": None}}, "ray_actor_options=None"),
        ({"deployment_config": {"ray_actor_options": {"resources": 1}}}, "resources=1"),
        (
            {"deployment_config": {"ray_actor_options": {"runtime_env": {"a": 1}}}}
            | {"runtime_env": {"b": 1}},
            "runtime_env=.*in one place",
        ),
        (scaled(), "autoscaling_config=1"),
        (scaled(target_queued_tokens=0), "target_queued_tokens=0 .*a number of tokens"),
        (scaled(target_queued_tokens=9, policy={}), "target_queued_tokens=9 .*another policy"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**fields)


def test_a_wrong_flag_tells_no_secrets() -> None:
    for wrong in ({"max_num_seqs": "many"}, {"port": 1}, {"apy_key": "sesame"}):
        with pytest.raises(ValidationError) as told:
            config(engine_kwargs={"api_key": "sesame"} | wrong)
        assert "sesame" not in str(told.value)
    with pytest.raises(ValidationError) as told:
        config(engine_kwargs={"api_key": ["x", "sesame"]})
    assert "sesame" not in str(told.value)


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


def test_each_process_of_an_engine_has_a_bundle() -> None:
    options = config(**two(), accelerator_type="H200").options()
    one = {"CPU": 1, "GPU": 2, "accelerator_type:H200": 0.001}
    assert options["placement_group_bundles"] == [one, one]
    actor = options["ray_actor_options"]
    assert (actor["num_cpus"], actor["num_gpus"]) == (1, 2)
    tpu = config(**two(), accelerator_type="TPU-V6E").options()["placement_group_bundles"]
    assert tpu[1] == {"CPU": 1, "TPU": 2, "accelerator_type:TPU-V6E": 0.001}
    own = [{"CPU": 2}, {"CPU": 3, "host": 1}]
    assert config(**two(own)).options()["placement_group_bundles"] == own
    alone = config(deployment_config={"placement_group_bundles": [{"CPU": 2}]}).options()
    assert alone["placement_group_bundles"] == [{"CPU": 2}]


def test_options_of_the_deployment_win() -> None:
    options = config(
        deployment_config={"num_replicas": 3, "name": "mine", "ray_actor_options": {"num_cpus": 2}},
        runtime_env={"env_vars": {"A": "b"}},
    ).options()
    assert (options["name"], options["num_replicas"]) == ("mine", 3)
    assert options["graceful_shutdown_timeout_s"] == 30
    actor = {"num_cpus": 2, "runtime_env": {"env_vars": {"A": "b"}}}
    assert options["ray_actor_options"] == actor


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"llm_configs": [config(), config()]}, "args.llm_configs.*another application"),
        ({}, "args.llm_configs=None"),
        ({"llm_configs": [config()], "model": "x"}, "args.model='x'"),
        ({"llm_configs": [config()], "ingress_deployment_config": 1}, "ingress_deployment_config"),
        ({"llm_configs": [config()], "require_room": 1}, "args.require_room=1"),
        ({"llm_configs": [{"model": "x"}]}, r"llm_configs\[0\].model"),
    ],
)
def test_an_application_is_of_one_model(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_openai_app(args)


def test_replicas_are_as_many_as_requests_and_waiting_tokens_want() -> None:
    own = config(**scaled(max_replicas=4)).options()["autoscaling_config"]
    wanted = {"target_queued_tokens": TARGET_QUEUED_TOKENS}
    assert own["policy"] == {"policy_function": SCALING, "policy_kwargs": wanted}
    assert own["max_replicas"] == 4
    auto = config(deployment_config={"num_replicas": "auto"}).options()
    assert auto["autoscaling_config"] == {"policy": own["policy"]}
    assert "autoscaling_config" not in config(deployment_config={"num_replicas": 2}).options()
    policy = WorkPolicy(target_queued_tokens=100)

    def asked(replicas: int, requests: float, tokens: dict[str, float] | None) -> float:
        context = SimpleNamespace(
            current_num_replicas=replicas,
            target_num_replicas=7,
            total_num_requests=requests,
            aggregated_metrics=None if tokens is None else {"queued_tokens": tokens},
            config=SimpleNamespace(get_target_ongoing_requests=lambda: 10.0),
        )
        return policy(context)[0]  # type: ignore[arg-type]

    assert asked(1, 35, None) == 3.5
    assert asked(2, 5, {"a": 120, "b": 130}) == 2.5
    assert asked(1, 0, {"a": 0}) == 0
    assert asked(0, 50, {}) == 7, "the first one is begun by Ray"

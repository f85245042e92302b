"""What is deployed on Ray: the fields of `ray.serve.llm.LLMConfig` that jaxserve knows."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ValidationError
from server.cli import build_parser
from server.commands.config_file import with_settings

# Flags of what Ray has in jaxserve's place: the socket, and the end of a replica.
OF_RAY = ("config", "host", "port", "uds", "shutdown_timeout", "record_trace", "num_workers")
OF_MODEL = ("model", "served_model_name")  # flags that `model_loading_config` gives
# as many as the server takes connections: its own limits on what waits are met first
MAX_ONGOING = 4096
# requests that wait for a replica to take them, such as while none serves
MAX_QUEUED = 4096
# prompt tokens that may wait in a replica before another one is wanted
TARGET_QUEUED_TOKENS = 16384
# Classes that Ray imports where it uses them.
ROUTER = "server.on_ray.router.PrefixRouter"
SCALING = "server.on_ray.scaling:WorkPolicy"


@dataclasses.dataclass(frozen=True)
class ModelLoadingConfig:
    """Which model.

    Attributes:
        model_id: the name that requests have.
        model_source: a folder, or an id of the hub; None: it is the name.
    """

    model_id: str
    model_source: str | None = None


@dataclasses.dataclass(frozen=True)
class LLMConfig:
    """One model and how it is deployed.

    Attributes:
        model_loading_config: which model, a `ModelLoadingConfig` or a mapping of its fields.
        engine_kwargs: flags of `jaxserve serve` by their names, with underscores or dashes.
        accelerator_type: of each replica, by Ray's names ("H200", "TPU-V6E"); None: no device.
        deployment_config: options of `serve.deployment`, such as `num_replicas`,
            `autoscaling_config`, `ray_actor_options`. Beside Ray's own fields `autoscaling_config`
            has `target_queued_tokens`: prompt tokens that may wait in a replica.
        runtime_env: of the replicas' processes.

    Raises:
        ValidationError: a field is unknown or of a wrong type, or a flag is not allowed.
    """

    model_loading_config: ModelLoadingConfig
    engine_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    accelerator_type: str | None = None
    deployment_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        loading = self.model_loading_config
        if not isinstance(loading, ModelLoadingConfig):
            read = read_fields(ModelLoadingConfig, "model_loading_config", loading)
            object.__setattr__(self, "model_loading_config", read)
        for name in ("engine_kwargs", "deployment_config", "runtime_env"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValidationError(name, getattr(self, name), "a mapping")
        for name in self.engine_kwargs:
            if name.replace("-", "_") in OF_RAY or name.replace("-", "_").startswith("ssl_"):
                allowed = "left out: Ray's own configuration has it"
                raise ValidationError(f"engine_kwargs.{name}", self.engine_kwargs[name], allowed)
            if name.replace("-", "_") in OF_MODEL:
                allowed = "left out: model_loading_config has it"
                raise ValidationError(f"engine_kwargs.{name}", self.engine_kwargs[name], allowed)
        bundles = self.deployment_config.get("placement_group_bundles")
        if bundles is not None and len(bundles) > 1:
            allowed = "one bundle: an engine of several processes is not served yet"
            raise ValidationError("deployment_config.placement_group_bundles", bundles, allowed)
        self._scaling()
        self.flags()

    def words(self) -> list[str]:
        """The command line that serves the model."""
        loading = self.model_loading_config
        own = {
            "model": loading.model_source or loading.model_id,
            "served-model-name": loading.model_id,
        }
        return with_settings(["serve"], own | dict(self.engine_kwargs), "engine_kwargs")

    def flags(self) -> argparse.Namespace:
        """The same, parsed.

        Raises:
            ValidationError: a flag is unknown, or its value is not allowed.
        """
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):
                return build_parser("serve").parse_args(self.words())
        except SystemExit:  # what the parser does after its line
            said = told.getvalue().strip()
        raise ValidationError("engine_kwargs", dict(self.engine_kwargs), f"flags: {said}")

    def options(self) -> dict[str, Any]:
        """Of the deployment: what it says itself, and what follows from the flags."""
        flags = self.flags()
        actor = dict(self.deployment_config.get("ray_actor_options", {}))
        if self.runtime_env:
            actor.setdefault("runtime_env", dict(self.runtime_env))
        if kind := self.accelerator_type:
            count = (flags.tensor_parallel_size or 1) * (flags.data_parallel_size or 1)
            resources = dict(actor.get("resources", {}))
            if kind.upper().startswith("TPU"):
                resources.setdefault("TPU", count)
            else:
                actor.setdefault("num_gpus", count)
            actor["resources"] = resources
            actor.setdefault("accelerator_type", kind)
        scaling = self._scaling()
        return {
            "name": f"jaxserve:{self.model_loading_config.model_id}".replace("/", "--"),
            "max_ongoing_requests": MAX_ONGOING,
            "max_queued_requests": MAX_QUEUED,
            "graceful_shutdown_timeout_s": flags.shutdown_timeout,
            "request_router_config": {"request_router_class": ROUTER},
            **self.deployment_config,
            **({} if scaling is None else {"autoscaling_config": scaling}),
            "ray_actor_options": actor,
        }

    def _scaling(self) -> dict[str, Any] | None:
        """Ray's `autoscaling_config`, by our policy where it names none; None: it is not given."""
        given = self.deployment_config.get("autoscaling_config")
        if given is None:
            return None
        field = "deployment_config.autoscaling_config"
        if not isinstance(given, Mapping):
            raise ValidationError(field, given, "a mapping")
        scaling = dict(given)
        most = scaling.pop("target_queued_tokens", None)
        if "policy" in scaling and most is not None:
            allowed = "left out where another policy is given"
            raise ValidationError(f"{field}.target_queued_tokens", most, allowed)
        most = TARGET_QUEUED_TOKENS if most is None else most
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValidationError(f"{field}.target_queued_tokens", most, "a number of tokens")
        ours = {"policy_function": SCALING, "policy_kwargs": {"target_queued_tokens": most}}
        scaling.setdefault("policy", ours)
        return scaling


def read_fields(kind: Any, field: str, given: Any) -> Any:
    """A dataclass of a mapping. Raises ValidationError: it is none, or has other fields."""
    names = [one.name for one in dataclasses.fields(kind)]
    if not isinstance(given, Mapping):
        raise ValidationError(field, given, f"a mapping of {', '.join(names)}")
    for name in given:
        if name not in names:
            raise ValidationError(f"{field}.{name}", given[name], f"one of {', '.join(names)}")
    if names[0] not in given:  # the others have defaults
        raise ValidationError(f"{field}.{names[0]}", None, "given")
    return kind(**given)

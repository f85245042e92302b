"""What is deployed on Ray: the fields of `ray.serve.llm.LLMConfig` that jaxserve knows."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.config.engine_config import MOST_PROCESSES
from jaxserve.config.settings import Integer
from jaxserve.errors import ValidationError, Verbatim
from server.cli import LIKE, build_parser
from server.commands.config_file import with_settings
from server.commands.nested_config import NESTED
from server.on_ray.placement import FIELD as BUNDLES
from server.on_ray.placement import bundles_of

# Flags of what Ray has in jaxserve's place: the socket, and the end of a replica.
OF_RAY = (
    *("config", "host", "port", "uds", "shutdown_timeout", "record_trace", "num_workers"),
    "api_server_count",
)
# Flags that tell the processes of an engine apart, or say their number by another name.
OF_PROCESSES = (
    *("process_id", "coordinator", "process_token_file", "nnodes", "node_rank"),
    *("master_addr", "master_port", "headless"),
)
OF_MODEL = (
    "model",
    "default_model",
    "served_model_name",
)  # flags that `model_loading_config` gives
# as many as the server takes connections: its own limits on what waits are met first
MAX_ONGOING = 4096
# requests that wait for a replica, or the front, to take them, such as while none serves
MAX_QUEUED = 4096
# requests that the front has, those that run and those that wait: it bounds their bytes
MAX_IN_FRONT = 2**16
# prompt tokens that may wait in a replica before another one is wanted
TARGET_QUEUED_TOKENS = 16384
# Classes that Ray imports where it uses them.
ROUTER = "server.on_ray.router.PrefixRouter"
SCALING = "server.on_ray.scaling:WorkPolicy"
ONE_VALUE = "one value for each flag that has no list"
HIDDEN = Verbatim("...")  # in the place of a value that may be a secret


@dataclasses.dataclass(frozen=True)
class ModelLoadingConfig:
    """Which model.

    Attributes:
        model_id: the name that requests have.
        model_source: a folder, or an id of the hub; None: it is the name.
    """

    model_id: str
    model_source: str | None = None

    def __post_init__(self) -> None:
        _check_text("model_loading_config.model_id", self.model_id)
        if self.model_source is not None:
            _check_text("model_loading_config.model_source", self.model_source)


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
        runtime_env: of the replicas' processes, where `ray_actor_options` has none.

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
        if self.accelerator_type is not None:
            _check_text("accelerator_type", self.accelerator_type)
        self._check_deployment()
        self._scaling()
        self._placement(flags := self.flags(), self._actor(flags))

    def _check_deployment(self) -> None:
        field = "deployment_config.ray_actor_options"
        actor = self.deployment_config.get("ray_actor_options", {})
        if not isinstance(actor, Mapping):
            raise ValidationError(field, actor, "a mapping")
        if not isinstance(actor.get("resources", {}), Mapping):
            raise ValidationError(f"{field}.resources", actor["resources"], "a mapping")
        if self.runtime_env and actor.get("runtime_env"):
            allowed = f"in one place: {field}.runtime_env is given too"
            raise ValidationError("runtime_env", HIDDEN, allowed)

    def _check_names(self, known: Collection[str]) -> None:
        """Refuse flags by their names alone: no value is told, for it may be a secret."""
        for name in self.engine_kwargs:
            field = f"engine_kwargs.{name}"
            if not isinstance(name, str):
                raise ValidationError(field, HIDDEN, "a name that is text")
            plain = name.replace("-", "_")
            if plain in OF_RAY or plain.startswith("ssl_"):
                raise ValidationError(field, HIDDEN, "left out: Ray's own configuration has it")
            if plain in OF_PROCESSES:
                allowed = "left out: the replica tells its processes, as many as num_processes"
                raise ValidationError(field, HIDDEN, allowed)
            if plain in OF_MODEL:
                raise ValidationError(field, HIDDEN, "left out: model_loading_config has it")
            flag = "--" + plain.partition(".")[0].replace("_", "-")
            if flag not in known and name not in NESTED:
                near = difflib.get_close_matches(flag, known, 1, LIKE)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValidationError(field, HIDDEN, f"a flag of jaxserve serve{hint}")

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
        parser = build_parser("serve")
        self._check_names(parser.flags_of("serve") - {"-h", "--help"})
        try:
            return _parsed(parser, self.words())
        except ValueError as error:
            said = str(error)
        for name, value in self.engine_kwargs.items():  # each alone: which one is it?
            try:
                _parsed(parser, with_settings(["serve"], {name: value}, "engine_kwargs"))
            except ValueError as error:
                # else it names words that are left over, which may be those of a secret
                reason = str(error) if str(error).startswith("argument --") else ONE_VALUE
                raise ValidationError(f"engine_kwargs.{name}", HIDDEN, reason) from None
        raise ValidationError("engine_kwargs", HIDDEN, said)

    def options(self) -> dict[str, Any]:
        """Of the deployment: what it says itself, and what follows from the flags."""
        flags = self.flags()
        actor, scaling = self._actor(flags), self._scaling()
        return {
            "name": f"jaxserve:{self.model_loading_config.model_id}".replace("/", "--"),
            "max_ongoing_requests": MAX_ONGOING,
            "max_queued_requests": MAX_QUEUED,
            "graceful_shutdown_timeout_s": flags.shutdown_timeout,
            "request_router_config": {"request_router_class": ROUTER},
            **self.deployment_config,
            **({} if scaling is None else {"autoscaling_config": scaling}),
            **self._placement(flags, actor),
            "ray_actor_options": actor,
        }

    def _actor(self, flags: argparse.Namespace) -> dict[str, Any]:
        """Options of the actor of each process: what it says itself, and its devices."""
        actor = dict(self.deployment_config.get("ray_actor_options", {}))
        if self.runtime_env:
            actor.setdefault("runtime_env", dict(self.runtime_env))
        if kind := self.accelerator_type:
            of_all = (flags.tensor_parallel_size or 1) * (flags.data_parallel_size or 1)
            of_all *= flags.pipeline_parallel_size or 1
            count = of_all // num_processes(flags)
            resources = dict(actor.get("resources", {}))
            if kind.upper().startswith("TPU"):
                resources.setdefault("TPU", count)
            else:
                actor.setdefault("num_gpus", count)
            actor["resources"] = resources
            actor.setdefault("accelerator_type", kind)
        if num_processes(flags) > 1:
            actor.setdefault("num_cpus", 1)  # as Ray has it for replicas
        return actor

    def _placement(self, flags: argparse.Namespace, actor: Mapping[str, Any]) -> dict[str, Any]:
        """Ray's `placement_group_bundles` where an engine has several processes.

        Raises:
            ValidationError: names what does not fit their number.
        """
        given = self.deployment_config.get("placement_group_bundles")
        count, devices = num_processes(flags), flags.tensor_parallel_size or 1
        engines, stages = flags.data_parallel_size or 1, flags.pipeline_parallel_size or 1
        if count == 1:
            if given is not None and not (isinstance(given, (list, tuple)) and len(given) == 1):
                allowed = "a list of one bundle: engine_kwargs.num_processes is 1"
                raise ValidationError(BUNDLES, given, allowed)
            return {}
        beside = f"where num_processes is {count}"
        for name, value, is_right, allowed in (
            ("tensor_parallel_size", devices, devices % count == 0, f"a multiple of {count}"),
            ("data_parallel_size", engines, engines == 1, "1"),
            ("pipeline_parallel_size", stages, stages == 1, "1"),
            ("isolate_engine", flags.isolate_engine, flags.isolate_engine, "true"),
        ):
            if not is_right:
                raise ValidationError(f"engine_kwargs.{name}", value, f"{allowed} {beside}")
        return {"placement_group_bundles": bundles_of(actor, count, given)}

    def _scaling(self) -> dict[str, Any] | None:
        """Ray's `autoscaling_config`, by our policy where it names none; None: it is not given."""
        given = self.deployment_config.get("autoscaling_config")
        if given is None:
            if self.deployment_config.get("num_replicas") != "auto":
                return None
            given = {}
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


def num_processes(flags: argparse.Namespace) -> int:
    """Of an engine. Raises ValidationError: it can have no such number."""
    count = 1 if flags.num_processes is None else flags.num_processes
    return Integer(1, MOST_PROCESSES).checked("engine_kwargs.num_processes", count)


def _check_text(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValidationError(field, value, "text that is not empty")


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The flags of a command line. Raises ValueError: says why the parser has refused them."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            found = parser.parse_args(words)
    except SystemExit:  # what the parser does after its line
        line = told.getvalue().strip()
    else:
        if found.model_path is not None:  # one of several values, left over by a flag
            raise ValueError(ONE_VALUE)
        return found
    raise ValueError(line.removeprefix("jaxserve serve: ").partition(" (see jaxserve")[0])


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
